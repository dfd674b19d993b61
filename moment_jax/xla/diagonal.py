"""Diagonals of matrices in few operations: `jnp.diagonal` takes 32 of StableHLO's, `jnp.diag` 13."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def diagonal_of(matrix: Array) -> Array:
    """The diagonals (..., D) of square matrices (..., D, D)."""
    *rest, _, size = matrix.shape
    flat = matrix.reshape(*rest, size * size)
    return jax.lax.slice_in_dim(flat, 0, size * size, size + 1, axis=-1)


def diagonal_matrix(entries: Array) -> Array:
    """The matrices (..., D, D) with the diagonals (..., D), and zero elsewhere."""
    shape = (*entries.shape, entries.shape[-1])
    # A selection, not a product with the identity, in which inf * 0 would be NaN.
    return jnp.where(on_diagonal(shape), entries[..., None, :], jnp.zeros((), entries.dtype))


def on_diagonal(shape: tuple[int, ...]) -> Array:
    """Whether an entry lies on the diagonal of its matrix, boolean (..., D, D)."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - back) for back in (2, 1))
    return row == column
