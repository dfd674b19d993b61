"""Nonnegative arrays of a given pattern with given sums."""

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_divide

Array = jax.Array


def fit_rows(pattern: Array, rows: Array) -> Array:
    """A nonnegative (T, D) array of this pattern, every row scaled to its sum in `rows`, (T,)."""
    factor = safe_divide(jnp.maximum(rows, 0), jnp.sum(pattern, axis=1))
    return pattern * factor[:, None]
