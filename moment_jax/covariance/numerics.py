"""Roots and quotients, finite with finite gradients at zero variance; Gram matrices."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from moment_jax import linalg
from moment_jax.xla import diagonal_matrix, diagonal_of, inlined, materialized, on_diagonal

Pair = tuple[Array, Array]


@jax.custom_jvp
@inlined
def nonnegative(x: Array) -> Array:
    """max(x, 0) for what is negative by rounding alone, with the full derivative at 0.

    `jnp.maximum` halves the derivative at every zero variance, and takes ten operations to do so.
    """
    return jnp.maximum(x, jnp.zeros((), x.dtype))


@nonnegative.defjvp
def _nonnegative_jvp(primals: tuple[Array], tangents: tuple[Array]) -> Pair:
    (x,), (change,) = primals, tangents
    return nonnegative(x), jax.lax.select(x < 0, jnp.zeros_like(change), change)


@jax.custom_jvp
@inlined
def safe_sqrt(x: Array) -> Array:
    """sqrt(max(x, 0)), with gradient 0 where x <= 0, in place of infinity; NaN stays NaN."""
    return jnp.sqrt(jnp.maximum(x, jnp.zeros((), x.dtype)))


@safe_sqrt.defjvp
def _safe_sqrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> Pair:
    root = safe_sqrt(*primals)
    return root, tangents[0] / jnp.where(root == 0, jnp.full((), jnp.inf, root.dtype), 2 * root)


@jax.custom_jvp
@inlined
def safe_divide(x: Array, y: Array) -> Array:
    """X / y, and 0 where |y| is so small that the derivative's 1 / y^2 overflows; NaN stays NaN."""
    return x / _safe_divisor(y)


@safe_divide.defjvp
def _safe_divide_jvp(primals: Pair, tangents: Pair) -> Pair:
    (x, y), (dx, dy) = primals, tangents
    divisor = _safe_divisor(y)
    quotient = x / divisor
    return quotient, (dx - quotient * dy) / divisor


def _safe_divisor(y: Array) -> Array:
    """Y, and infinity where |y| is too small: then the quotient and its derivatives are 0."""
    void = jnp.abs(y) <= 2 * jnp.finfo(y.dtype).tiny ** 0.5
    return jnp.where(void, jnp.full((), jnp.inf, y.dtype), y)


def under(rows: Array, metric: Array | None) -> Array:
    """Rows (T, D) times a matrix (D, D), a diagonal (D,), or None for the identity."""
    if metric is None:
        return rows
    return rows * metric[None, :] if metric.ndim == 1 else rows @ metric


@jax.custom_jvp
def gram(rows: Array, metric: Array | None = None) -> Array:
    """The product rows A rows^T of a (T, D) array; A and its changes are symmetric, (D,), or None."""
    return under(rows, metric) @ rows.T


def _gram_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Pair:
    """The derivative is half + half^T, which saves one product of two or of four in a gradient."""
    (rows, metric), (change, metric_change) = primals, tangents
    halves = []
    if not isinstance(change, SymbolicZero):
        halves.append(under(change, metric))
    if metric is not None and not isinstance(metric_change, SymbolicZero):
        halves.append(0.5 * under(rows, metric_change))
    half = sum(halves[1:], halves[0]) @ rows.T
    return gram(rows, metric), materialized(half + half.T)


gram.defjvp(_gram_jvp, symbolic_zeros=True)


def weighted_sum(weights: Array, rows: Array) -> Array:
    """sum_t weights_t rows_t, (D,): under a `vmap` over rows XLA for CPU would copy for a product."""
    return jnp.sum(weights[:, None] * rows, axis=0)


def vector_variance(cov: Array) -> Array:
    """Variances (D,) of a vector, from its covariance (D, D) or variances (D,)."""
    return cov if cov.ndim == 1 else diagonal_of(cov)


def vector_cov(cov: Array) -> Array:
    """Covariance (D, D) of a vector, from its covariance (D, D) or variances (D,)."""
    return diagonal_matrix(cov) if cov.ndim == 1 else cov


def summed_covs(*covs: Array) -> Array:
    """The sum of covariances of a vector, (D, D), or of variances (D,) if all are."""
    if any(cov.ndim == 2 for cov in covs):
        covs = tuple(vector_cov(cov) for cov in covs)
    return sum(covs[1:], covs[0])


def kernel_noise(weights: Any, features: Array | None, rows: Array) -> Array:
    """sum_ij (features + rows^T rows)_ij Cov[w_io, w_jp]: (O,) if uncorrelated, else (O, O).

    `features` is (D, D), a diagonal (D,), or None for zero.
    """
    if weights.uncorrelated:
        squares = jnp.sum(rows**2, axis=0)
        squares = squares if features is None else squares + vector_variance(features)
        return weights.noise_variance(jnp.zeros_like(squares), squares)
    moment = gram(rows.T)
    return weights.noise_block(moment if features is None else moment + vector_cov(features))


def outer_by_share(rows: Array, columns: Array) -> Array:
    """A (T, D) array with these sums over features, (T,), in proportion to `columns`, (D,)."""
    return rows[:, None] * safe_divide(columns, jnp.sum(columns))[None, :]


@inlined
def correlation_of(cov: Array) -> Array:
    """The correlation matrix of a positive semidefinite matrix."""
    one = jnp.ones((), cov.dtype)
    inverse = safe_divide(one, safe_sqrt(diagonal_of(cov)))
    correlation = inverse[:, None] * cov * inverse[None, :]
    # Not `clip`: its gradient at the bounds is a half.
    correlation = jnp.where(correlation > one, one, correlation)
    correlation = jnp.where(correlation < -one, -one, correlation)
    return jnp.where(on_diagonal(cov.shape), one, correlation)


def definite(gram: Array) -> Array:
    """A nearby positive semidefinite matrix with the same diagonal; semidefinite ones are unchanged.

    Derivatives treat the correction as constant.
    """
    root, correlation = safe_sqrt(diagonal_of(gram)), correlation_of(gram)
    wide = correlation.astype(jnp.promote_types(correlation.dtype, jnp.float32))
    factor = linalg.psd_cholesky(wide, bounded=True)
    nearby = linalg.dot(factor, factor.T).astype(correlation.dtype)
    missing = jax.lax.stop_gradient(nearby - correlation)
    nearby = jnp.where(on_diagonal(gram.shape), correlation, correlation + missing)
    return root[:, None] * nearby * root[None, :]
