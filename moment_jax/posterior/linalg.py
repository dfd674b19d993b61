"""Square root and log-determinant of covariance matrices that may be singular, and products."""

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.xla import diagonal_of


@jax.custom_jvp
def psd_sqrt(cov: Array) -> Array:
    """The symmetric square root R of a PSD matrix: R R = cov, (n, n) to (n, n).

    Eigenvalues below zero by rounding count as zero. The derivative, of any order, solves
    R dR + dR R = dcov, which unlike the derivative of `eigh` is right for repeated eigenvalues too.
    Between directions without variance, where it is infinite, it is set to zero.
    """
    values, vectors = jnp.linalg.eigh(cov)
    return (vectors * jnp.sqrt(jnp.maximum(values, 0))[None, :]) @ vectors.T


@psd_sqrt.defjvp
def _psd_sqrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    root = psd_sqrt(primals[0])
    return root, _lyapunov(root, 0.5 * (tangents[0] + tangents[0].T))


def _lyapunov(root: Array, right: Array) -> Array:
    """X with root X + X root = right, for a symmetric PSD root, (n, n) each.

    A `custom_linear_solve`, so that JAX differentiates the equation and not `eigh`.
    """

    def solve(_: object, right: Array) -> Array:
        values, vectors = jnp.linalg.eigh(root)
        total = values[:, None] + values[None, :]
        # `eigh` returns a zero eigenvalue of root^2 as a few eps times the largest, for any n.
        # Between two of those there is only noise to divide.
        usable = total > 2 * (10 * jnp.finfo(values.dtype).eps) ** 0.5 * jnp.max(values)
        coefficients = vectors.T @ right @ vectors
        solution = jnp.where(usable, coefficients / jnp.where(usable, total, 1), 0)
        return vectors @ solution @ vectors.T

    return jax.lax.custom_linear_solve(lambda x: root @ x + x @ root, right, solve, symmetric=True)


@jax.custom_jvp
def psd_logdet(cov: Array) -> Array:
    """Log-determinant of a PSD matrix (n, n), by Cholesky: a scalar, -inf where it is singular.

    There its derivative, infinite too, is set to zero. A matrix that is singular up to rounding may
    count as regular, with about log(eps) for each lost dimension.
    """
    return _logdet_and_factor(cov)[0]


@psd_logdet.defjvp
def _psd_logdet_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    logdet, factor = _logdet_and_factor(primals[0])
    inverse = jax.scipy.linalg.cho_solve((factor, True), jnp.eye(len(factor), dtype=factor.dtype))
    return logdet, jnp.where(logdet > -jnp.inf, jnp.sum(inverse * tangents[0]), 0)


def _logdet_and_factor(cov: Array) -> tuple[Array, Array]:
    """Log-determinant and Cholesky factor; -inf and the identity where there is none."""
    factor = jnp.linalg.cholesky(cov)
    # False for the NaN of a failed factorisation.
    regular = jnp.all(diagonal_of(factor) > 0)
    factor = jnp.where(regular, factor, jnp.eye(len(factor), dtype=factor.dtype))
    return jnp.where(regular, 2 * jnp.sum(jnp.log(diagonal_of(factor))), -jnp.inf), factor


def outer(total: Array, cov: Array) -> Array:
    """(...) times an array: (..., *cov.shape)."""
    shape = (*total.shape, *cov.shape)
    return jnp.expand_dims(total, range(total.ndim, len(shape))) * jnp.broadcast_to(cov, shape)
