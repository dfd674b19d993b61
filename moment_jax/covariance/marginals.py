"""Nonnegative arrays of a given pattern with given sums: iterative proportional fitting."""

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_divide

Array = jax.Array


def fit_marginals(pattern: Array, rows: Array, columns: Array) -> Array:
    """A nonnegative array of this pattern, scaled by columns to their sums, then by rows to theirs.

    Both sums hold at once where the result is of rank one; else the rows' hold (one step of iterative
    proportional fitting).

    Args:
      pattern: (T, D), not negative.
      rows: sums over the columns, (T,).
      columns: sums over the rows, (D,).
    """
    return fit_columns(fit_columns(pattern, columns).T, rows).T


def fit_columns(pattern: Array, columns: Array) -> Array:
    """A nonnegative (T, D) array of this pattern, every column scaled to its sum in `columns`."""
    columns = jnp.maximum(columns, 0)
    return pattern * safe_divide(columns, jnp.sum(pattern, axis=0))[None, :]
