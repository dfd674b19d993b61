"""Leading batch axes: modules accept any number of them, layers take one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from moment_jax.covariance import Covariance

Array = jax.Array


def over_batch(
    layer: Callable[[Array, Covariance], Any],
    mean: Array,
    cov: Covariance | None,
    structure: type[Covariance],
) -> Any:
    """Apply `layer` to every sequence of a batch (..., T, D).

    Args:
      layer: a function of one (T, D) mean and its covariance.
      mean: (..., T, D).
      cov: covariance with the same leading axes on its leaves; None where the input is certain.
      structure: the structure in which a certain input starts.
    """
    if mean.ndim < 2:
        raise ValueError(
            f"A module needs an input of shape (..., T, D). Got {tuple(mean.shape)}. For a single "
            "row, use x[None, :]."
        )
    if mean.ndim > 2:
        if cov is None:
            return jax.vmap(lambda m: over_batch(layer, m, None, structure))(mean)
        return jax.vmap(lambda m, c: over_batch(layer, m, c, structure))(mean, cov)
    return layer(mean, _certain(mean, structure) if cov is None else cov)


def over_batch_with_memory(
    layer: Callable[[Array, Covariance, Array, Covariance], Any],
    mean: Array,
    cov: Covariance | None,
    memory_mean: Array,
    memory_cov: Covariance | None,
    structure: type[Covariance],
) -> Any:
    """`over_batch` of a sequence (..., T, D) and a memory (..., S, E) with the same leading axes."""
    if mean.ndim < 2 or mean.shape[:-2] != memory_mean.shape[:-2]:
        raise ValueError(
            "A decoder needs a sequence (..., T, D) and a memory (..., S, E) with the same leading "
            f"axes. Got {tuple(mean.shape)} and {tuple(memory_mean.shape)}. For a single row, use "
            "x[None, :]; for one memory of a whole batch, broadcast it."
        )
    if mean.ndim > 2:
        axes = (0, None if cov is None else 0, 0, None if memory_cov is None else 0)
        return jax.vmap(
            lambda m, c, n, d: over_batch_with_memory(layer, m, c, n, d, structure), in_axes=axes
        )(mean, cov, memory_mean, memory_cov)
    return layer(
        mean,
        _certain(mean, structure) if cov is None else cov,
        memory_mean,
        _certain(memory_mean, structure) if memory_cov is None else memory_cov,
    )


def _certain(mean: Array, structure: type[Covariance]) -> Covariance:
    """The covariance of a sequence that is known."""
    return structure.zeros((mean.shape[0], mean.shape[1]), mean.dtype)
