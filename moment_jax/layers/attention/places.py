"""Where the queries' own tokens stand among the keys: in their order, or at places that are given.

In self-attention of a whole sequence query a is made of token a. With cached keys the queries are made
of the newest tokens alone, and `places` (T,) says which keys are theirs; None for token a.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moment_jax.xla import diagonal_matrix, rows_diagonal

Array = jax.Array


def own_tokens(array: Array, places: Array | None) -> Array:
    """The rows (T, ...) of an array (S, ...) of all tokens that belong to the queries."""
    return array if places is None else array[places]


def own_entries(matrix: Array, places: Array | None) -> Array:
    """Every query's entry at its own token, (..., T) of (..., T, S)."""
    if places is None:
        own = rows_diagonal
        for _ in range(matrix.ndim - 2):
            own = jax.vmap(own)
        return own(matrix)
    rows = jnp.arange(matrix.shape[-2])
    return matrix[..., rows, places]


def at_own(values: Array, places: Array | None, num_keys: int) -> Array:
    """A matrix (T, S) with `values` (T,) where queries meet their own tokens, zero elsewhere."""
    if places is None:
        return diagonal_matrix(values)
    return values[:, None] * jax.nn.one_hot(places, num_keys, dtype=values.dtype)
