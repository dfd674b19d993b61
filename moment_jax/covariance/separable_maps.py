"""Linear maps of a `Separable`: of its features, of its tokens, entry by entry, and of low rank."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp

from moment_jax.covariance import separable_noise
from moment_jax.covariance.low_rank import low_rank_moments
from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.covariance.separable_grams import Grams
from moment_jax.xla import rows_diagonal

if TYPE_CHECKING:
    from moment_jax.covariance.separable import Separable

Array = jax.Array
S = TypeVar("S", bound="Separable")


def rescale(cov: S, factor: Array) -> S:
    """X * factor: exact, but for the covariance of the sum where the factor differs by token."""
    scale = cov.scale * factor
    if factor.shape[0] > 1:
        return dataclasses.replace(cov, scale=scale, sum_variance=None)
    token_gram = cov.token_correlation * (scale @ scale.T)
    grams = Grams(scale**2, token_gram, cov.features().rescaled(factor[0]))
    variance = cov.summed_variance() * factor[0] ** 2
    return cov.with_grams(grams, scale=scale, sum_variance=variance)


def map_features(cov: S, kernel: Array) -> S:
    """X @ kernel: the covariance of the sum is exact, all of it for a scale of rank one."""
    before, variance, squared = cov.features(), cov.variance(), kernel**2
    features = before.map(kernel)
    factor = safe_divide(jnp.maximum(features.diag(), 0), before.diag() @ squared)
    # With a scale of rank one the tokens' correlation passes as it is. The variances' sums over the
    # features without the variances, for which queries and keys have no use.
    token_gram = cov.token_gram()
    ratio = safe_divide(variance @ (squared @ factor), rows_diagonal(token_gram))
    root = safe_sqrt(ratio)
    return cov.from_moments(
        (variance @ squared) * factor[None, :],
        root[:, None] * token_gram * root[None, :],
        features,
        cov.pool,
    )


def map_tokens(cov: S, weights: Array) -> S:
    """Weights @ x: variances and token Gram matrix are exact."""
    scaled = weights[:, :, None] * cov.scale[None]
    partial = jnp.einsum("utd,ts->usd", scaled, cov.token_correlation)
    variance = jnp.maximum(jnp.sum(partial * scaled, axis=1), 0)
    token_gram = weights @ cov.token_gram() @ weights.T
    features = cov.features()
    if weights.shape[0] == 1:
        known = cov.summed_variance()
        variance = separable_noise.sum_variance(cov, weights[0], known)[None, :]
        ratio = safe_divide(variance[0], known)
    else:
        total = jnp.sum(weights, axis=0)
        ratio = safe_divide(cov.pooled_variance(total), cov.pooled_variance())
    features = features.rescaled(cov.share(safe_sqrt(ratio)))
    return cov.from_moments(variance, token_gram, features)


def map_low_rank(cov: S, gain: Array, left: Array, right: Array) -> S:
    """See `Covariance.map_low_rank`."""
    pairs = cov.token_correlation
    if cov.pool is not None:
        pairs = cov.pool[:, None] * pairs * cov.pool[None, :]
    variance, pattern, feature_gram = low_rank_moments(
        cov.scale, cov.feature_correlation, gain, left, right, pairs
    )
    token_gram = cov.token_correlation * pattern
    return cov.from_moments(variance, token_gram, feature_gram, cov.pool)
