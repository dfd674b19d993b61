"""Nonnegative arrays of a given pattern with given sums: iterative proportional fitting."""

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_divide, weighted

Array = jax.Array


def fit_marginals(pattern: Array, rows: Array, columns: Array, pool: Array | None = None) -> Array:
    """A nonnegative array of this pattern, scaled by columns to their sums, then by rows to theirs.

    Both sums hold at once where the result is of rank one; else the rows' hold (one step of iterative
    proportional fitting).

    Args:
      pattern: (T, D), not negative.
      rows: sums over the columns, (T,).
      columns: sums over the rows, (D,).
      pool: weights of the rows in the columns' sums, (T,); None for all alike.
    """
    return fit_columns(fit_columns(pattern, columns, pool).T, rows).T


def fit_columns(pattern: Array, columns: Array, pool: Array | None = None) -> Array:
    """A nonnegative (T, D) array of this pattern, every column scaled to its sum in `columns`."""
    columns = jnp.maximum(columns, 0)
    return pattern * safe_divide(columns, jnp.sum(weighted(pattern, pool), axis=0))[None, :]
