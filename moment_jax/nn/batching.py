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
    return layer(
        mean, structure.zeros((mean.shape[0], mean.shape[1]), mean.dtype) if cov is None else cov
    )
