"""Positions of the queries' own tokens among the keys.

In self-attention query a comes from token a. With cached keys, queries come from the newest tokens
only, and `places` (T,) gives their positions; None means token a.
"""

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.xla import diagonal_matrix, rows_diagonal


def own_tokens(array: Array, places: Array | None) -> Array:
    """The rows (T, ...) of an array (S, ...) that belong to the queries' tokens."""
    return array if places is None else array[places]


def own_entries(matrix: Array, places: Array | None) -> Array:
    """Each query's entry at its own token, (..., T) of (..., T, S)."""
    if places is None:
        own = rows_diagonal
        for _ in range(matrix.ndim - 2):
            own = jax.vmap(own)
        return own(matrix)
    rows = jnp.arange(matrix.shape[-2])
    return matrix[..., rows, places]


def at_own(values: Array, places: Array | None, num_keys: int) -> Array:
    """A matrix (T, S) with `values` (T,) at each query's own token, zero elsewhere."""
    if places is None:
        return diagonal_matrix(values)
    return values[:, None] * jax.nn.one_hot(places, num_keys, dtype=values.dtype)
