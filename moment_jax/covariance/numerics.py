"""Square roots and quotients that stay finite, with finite gradients, at zero variance."""

import jax
import jax.numpy as jnp

Array = jax.Array


def safe_sqrt(x: Array) -> Array:
    """sqrt(max(x, 0)), with gradient 0 where x <= 0.

    At a variance of exactly zero the true derivative is infinite; the variance itself does not pass
    through this root, so nothing is lost but that infinity.
    """
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def safe_divide(x: Array, y: Array, otherwise: float = 0.0) -> Array:
    """Quotient x / y, and `otherwise` where y is zero, or so small that 1 / y^2 would overflow.

    That is in the derivative, which would be NaN at x = 0.
    """
    usable = jnp.abs(y) > 2 * jnp.finfo(y.dtype).tiny ** 0.5
    return jnp.where(usable, x / jnp.where(usable, y, 1), otherwise)


def gram(a: Array, b: Array, metric: Array | None = None) -> Array:
    """The product a A b^T of (T, D) and (S, D) arrays: A None (identity), (D,) diagonal or (D, D)."""
    if metric is None:
        return a @ b.T
    if metric.ndim == 1:
        return (a * metric[None, :]) @ b.T
    return (a @ metric) @ b.T


def vector_variance(cov: Array) -> Array:
    """The variances (D,) of a vector whose covariance is given as (D,) variances or as (D, D)."""
    return cov if cov.ndim == 1 else jnp.diagonal(cov)


def vector_cov(cov: Array) -> Array:
    """The covariance (D, D) of a vector whose covariance is given as (D,) variances or as (D, D)."""
    return jnp.diag(cov) if cov.ndim == 1 else cov


def weighted(rows: Array, pool: Array | None) -> Array:
    """Rows (T, ...) times weights (T,); None for weights of one."""
    return rows if pool is None else pool.reshape(-1, *(1,) * (rows.ndim - 1)) * rows


def average_gain(scale: Array, gain: Array, pool: Array | None = None) -> Array:
    """Each feature's gain (T, D), averaged over the tokens by their variance scale^2, (D,)."""
    own = weighted(scale, pool)
    return safe_divide(jnp.sum(own * (scale * gain), axis=0), jnp.sum(own * scale, axis=0))


def correlation_of(cov: Array, variance: Array | None = None) -> Array:
    """The correlation matrix of a positive semidefinite matrix: so is it, with a unit diagonal.

    Args:
      cov: the matrix.
      variance: its diagonal, where that is known.
    """
    deviation = safe_sqrt(jnp.diagonal(cov) if variance is None else variance)
    inverse = safe_divide(jnp.ones_like(deviation), deviation)
    correlation = jnp.clip(inverse[:, None] * cov * inverse[None, :], -1, 1)
    unit = jnp.eye(cov.shape[0], dtype=bool)
    return jnp.where(unit, jnp.ones((), cov.dtype), correlation)
