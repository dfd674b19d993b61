"""How much of the identity is added to the curvature: fixed, scheduled, or adapted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Schedule = Callable[[Array], Any]


@dataclasses.dataclass(frozen=True)
class LevenbergMarquardt:
    """Damping that grows where the quadratic model promised too much, and else shrinks.

    The reduction ratio is the change of the loss over the change that the model predicted for the step
    before. Give the change to `update(..., change=change)`: the loss after the previous step less that
    before it, on the same batch. Where it is not given, or not finite, damping stays.

    Args:
      initial: where it starts.
      factor: what it is divided or multiplied by, above 1.
      lower: below this ratio it grows.
      upper: above this ratio it shrinks.
      smallest: never below this.
      largest: never above this.

    Raises:
      ValueError: if the numbers are not in order.
    """

    initial: float = 1e-2
    factor: float = 1.5
    lower: float = 0.25
    upper: float = 0.75
    smallest: float = 1e-8
    largest: float = 1e4

    def __post_init__(self) -> None:
        if not 0 < self.smallest <= self.initial <= self.largest:
            raise ValueError(
                "`LevenbergMarquardt` needs 0 < smallest <= initial <= largest. Got "
                f"{self.smallest}, {self.initial} and {self.largest}."
            )
        if self.factor <= 1 or not self.lower < self.upper:
            raise ValueError(
                "`LevenbergMarquardt` needs factor > 1 and lower < upper. Got "
                f"{self.factor}, {self.lower} and {self.upper}."
            )

    def adapted(self, damping: Array, change: Array, predicted: Array) -> Array:
        """The damping for the next step.

        Args:
          damping: that of the step before.
          change: of the loss by that step, negative where it fell.
          predicted: the same by the quadratic model.
        """
        ratio = change / jnp.where(predicted < 0, predicted, -1)
        known = jnp.isfinite(ratio) & (predicted < 0)
        worse = jnp.where(ratio < self.lower, self.factor, 1.0)
        scale = jnp.where(ratio > self.upper, 1 / self.factor, worse).astype(damping.dtype)
        scale = jnp.where(known, scale, 1)
        return jnp.clip(damping * scale, self.smallest, self.largest)


Number = float | Array
Damping = Number | Schedule | LevenbergMarquardt


def initial_damping(damping: Damping) -> Array:
    """Where the damping in the state starts."""
    if isinstance(damping, LevenbergMarquardt):
        return jnp.asarray(damping.initial, jnp.float32)
    return current(damping, jnp.int32(0))


def current(value: Number | Schedule, count: Array) -> Array:
    """The value of a number or a schedule at a step."""
    if callable(value):
        value = value(count)
    return jnp.asarray(value, jnp.float32)


def check_range(
    name: str, what: str, value: Any, *, least: float | None = None, below: float | None = None
) -> None:
    """Raise unless a Python number lies in its range; arrays and schedules are not looked into."""
    if not isinstance(value, int | float):
        return
    wanted = f">= {least}" if below is None else f">= {least} and < {below}"
    too_small = least is not None and not value >= least
    if too_small or (below is not None and not value < below):
        raise ValueError(f"`{name}` needs {what} {wanted}. Got {value}.")
