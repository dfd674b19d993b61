"""The temperature of a relaxation over the course of training, as an Optax schedule."""

from __future__ import annotations

import optax


def exponential_annealing(start: float, floor: float, num_steps: int) -> optax.Schedule:
    """A temperature that falls geometrically from `start` to `floor` in `num_steps`, then stays.

    Any Optax schedule will do for a temperature; this one is `optax.exponential_decay` told by its two
    ends, and never below the floor, where gradients would grow without bound.

    Args:
      start: the temperature at step 0, positive.
      floor: the temperature from step num_steps on, positive and not above start.
      num_steps: at least 1.

    Returns:
      A function of the step.

    Raises:
      ValueError: if the numbers are not so.

    >>> schedule = exponential_annealing(1.0, 0.25, 100)
    >>> [round(float(schedule(step)), 3) for step in (0, 50, 100, 1000)]
    [1.0, 0.5, 0.25, 0.25]
    """
    if not 0 < floor <= start < float("inf"):
        raise ValueError(
            f"`exponential_annealing` needs 0 < floor <= start. Got floor {floor} and start {start}."
        )
    if num_steps < 1:
        raise ValueError(f"`exponential_annealing` needs num_steps >= 1. Got {num_steps}.")
    if floor == start:
        return optax.constant_schedule(start)
    return optax.exponential_decay(start, num_steps, floor / start, end_value=floor)
