"""E[log softmax(f)] and log E[softmax(f)] for Gaussian logits f, by a fixed set of points.

The points are f_k = mean + L z_k with L L^T = cov. The z_k are scrambled Sobol points mapped to the
normal distribution, together with their reflections -z_k, scaled to a variance of exactly one in each
coordinate. With four points or more per class they are also transformed linearly so that all their
second moments are exact; the rule then integrates polynomials of degree three exactly. It is
deterministic, and its error falls roughly as 1 / num_points instead of 1 / sqrt(num_points).

Derivatives follow Price's theorem, dE[g]/dmean = E[g'] and dE[g]/dcov = E[g'']/2, over the same
points. They are finite at any covariance, including singular and zero ones, where the derivative of
the root L is infinite. Second derivatives with respect to the covariance go through L and are right
where the covariance is positive definite.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.numerics import safe_sqrt, vector_variance
from moment_jax.linalg import psd_cholesky

Pair = tuple[Array, Array]


def wide(*arrays: Array) -> tuple[Array, ...]:
    """The arrays in float32 at least: in bfloat16 the root of a covariance of 128 classes is zero."""
    return tuple(x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays)


def count_points(num_points: int | None, default: int = 128) -> int:
    """The number of points, rounded up to a power of two; None for `default`."""
    if num_points is not None and num_points < 1:
        raise ValueError(f"The cubature needs num_points >= 1. Got {num_points}.")
    return 1 << (max(num_points or default, 8) - 1).bit_length()


@functools.lru_cache(maxsize=32)
def normal_points(num_dims: int, num_points: int) -> np.ndarray:
    """Points (num_points, num_dims) with mean 0 and second moment the identity, see above."""
    from scipy.special import ndtri  # here, for they take half a second to import
    from scipy.stats import qmc

    half, generator, parts = num_points // 2, np.random.default_rng(0), []
    for first in range(0, num_dims, qmc.Sobol.MAXDIM):
        dims = min(num_dims - first, qmc.Sobol.MAXDIM)
        parts.append(qmc.Sobol(dims, seed=generator).random(half))
    # A quarter into its cell, so that a coordinate and its reflection visit all num_points cells.
    points = ndtri((np.floor(half * np.concatenate(parts, axis=1)) + 0.25) / half)
    points = np.concatenate([points, -points])
    if num_points >= 4 * num_dims:
        eigenvalues, vectors = np.linalg.eigh(points.T @ points / num_points)
        points = points @ (vectors / np.sqrt(eigenvalues)) @ vectors.T
    else:
        points = points / np.sqrt(np.mean(points**2, axis=0))
    points.flags.writeable = False
    return points


def gaussian_points(mean: Array, cov: Array, num_points: int) -> Array:
    """Cubature points for N(mean, cov), (num_points, C); cov is (C,) variances or (C, C)."""
    points = jnp.asarray(normal_points(mean.shape[0], num_points), mean.dtype)
    if cov.ndim == 1:
        return mean[None, :] + points * safe_sqrt(cov)[None, :]
    return mean[None, :] + points @ psd_cholesky(cov).T


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def expected_logsumexp(mean: Array, cov: Array, num_points: int) -> Array:
    """E[logsumexp(f)], a scalar, f ~ N(mean, cov) with cov (C,) or (C, C)."""
    points = gaussian_points(mean, cov, num_points)
    return jnp.mean(jax.nn.logsumexp(points, axis=1))


@expected_logsumexp.defjvp
def _expected_logsumexp_jvp(num_points: int, primals: Pair, tangents: Pair) -> Pair:
    points = gaussian_points(*primals, num_points)
    weights = jax.nn.softmax(points, axis=1)
    mean_dot, cov_dot = tangents
    diagonal, pulled = curvature_terms(weights, cov_dot)
    slope = jnp.mean(weights, axis=0) @ (mean_dot + diagonal / 2)
    tangent = slope - jnp.mean(jnp.sum(weights * pulled, axis=1)) / 2
    return jnp.mean(jax.nn.logsumexp(points, axis=1)), tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def log_expected_softmax(mean: Array, cov: Array, num_points: int) -> Array:
    """Log E[softmax(f)], (C,), f ~ N(mean, cov) with cov (C,) or (C, C); exp of it sums to one.

    A class with a mean of -inf is impossible: its result is -inf and its derivatives are zero.
    """
    return log_mean_exp(log_softmax_rows(gaussian_points(mean, cov, num_points)))


@log_expected_softmax.defjvp
def _log_expected_softmax_jvp(num_points: int, primals: Pair, tangents: Pair) -> Pair:
    log_weights = log_softmax_rows(gaussian_points(*primals, num_points))
    value = log_mean_exp(log_weights)
    possible = value > -jnp.inf
    weights = jnp.exp(log_weights)
    # Each point's share in a class's probability; columns sum to one even where exp underflows.
    shares = jax.nn.softmax(jnp.where(possible[None, :], log_weights, 0), axis=0)
    mean_dot, cov_dot = tangents
    diagonal, pulled = curvature_terms(weights, cov_dot)
    common = -weights @ (mean_dot + diagonal / 2) + jnp.sum(weights * pulled, axis=1)
    tangent = mean_dot + diagonal / 2 - jnp.sum(shares * pulled, axis=0) + common @ shares
    return value, jnp.where(possible, tangent, 0)


def log_softmax_rows(points: Array) -> Array:
    """Log softmax of every row; -inf where the logit is -inf."""
    largest = jax.lax.stop_gradient(jnp.max(points, axis=1, keepdims=True))
    some = largest > -jnp.inf
    shifted = points - jnp.where(some, largest, 0)
    total = jnp.sum(jnp.exp(shifted), axis=1, keepdims=True)
    return shifted - jnp.log(jnp.where(some, total, 1))


def log_mean_exp(values: Array) -> Array:
    """Log of the mean over rows of exp(values), (N, C) -> (C,); exact if all rows are equal."""
    largest = jax.lax.stop_gradient(jnp.max(values, axis=0, keepdims=True))
    some = largest > -jnp.inf
    average = jnp.mean(jnp.exp(values - jnp.where(some, largest, 0)), axis=0)
    return jnp.log(jnp.where(some[0], average, 1)) + largest[0]


def curvature_terms(weights: Array, cov_dot: Array) -> Pair:
    """The diagonal of the covariance's tangent, and the product of each point's weights with it."""
    if cov_dot.ndim == 1:
        return cov_dot, weights * cov_dot[None, :]
    return vector_variance(cov_dot), weights @ ((cov_dot + cov_dot.T) / 2)
