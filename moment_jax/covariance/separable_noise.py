"""What random parameters and elementwise functions give `Separable`: variances and Gram matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from moment_jax.covariance.base import ElementwiseGain, RandomKernel
from moment_jax.covariance.feature_gram import FeatureGram, column_noise
from moment_jax.covariance.marginals import fit_marginals
from moment_jax.covariance.numerics import average_gain, gram, vector_variance, weighted
from moment_jax.xla import materialized, product_with_transposed, rows_diagonal

if TYPE_CHECKING:
    from moment_jax.covariance.separable import Separable

Array = jax.Array
Moments = tuple[Array, Array, FeatureGram]  # variance (T, D), token and feature Gram matrix


def kernel(cov: Separable, mean: Array, weights: RandomKernel) -> Moments:
    """What the randomness of a kernel adds to x @ kernel: see `Covariance.weight_noise`."""
    metric = weights.input_metric()
    token_gram = cov.token_gram(metric)
    of_mean = gram(mean, mean, metric)
    if weights.uncorrelated:  # no feature correlation enters the variances, and none comes out
        variance = weights.noise_variance(mean, cov.variance())
        features = column_noise(weights, mean, cov.variance(), cov.pool)
        return variance, token_gram + of_mean, features
    none = materialized(jnp.zeros_like(mean))  # a right operand, where the kernel is `matmul`'s
    of_noise = weights.noise_block(cov.feature_gram())
    # The variances by the noise of x have the pattern that uncorrelated features would give.
    variance = fit_marginals(
        weights.noise_variance(none, cov.variance()),
        rows_diagonal(token_gram),
        jnp.diagonal(of_noise),
        cov.pool,
    )
    variance = weights.noise_variance(mean, none) + variance
    of_certain = weights.noise_block(cov.over_tokens(mean))
    return variance, of_mean + token_gram, FeatureGram(of_certain + of_noise)


def gain(cov: Separable, mean: Array, gain_cov: Array) -> Moments:
    """What a random gain, shared by the tokens, adds to gain * x: see `Covariance.gain_noise`."""
    metric = vector_variance(gain_cov)
    variance = (cov.variance() + mean**2) * metric[None, :]
    token_gram = cov.token_gram(metric) + gram(mean, mean, metric)
    if gain_cov.ndim == 1:
        features = FeatureGram(diagonal=jnp.sum(weighted(variance, cov.pool), axis=0))
    else:
        features = FeatureGram((cov.feature_gram() + cov.over_tokens(mean)) * gain_cov)
    return variance, token_gram, features


def elementwise(cov: Separable, moments: ElementwiseGain) -> tuple[Array, FeatureGram]:
    """Gram matrices of f(x), f elementwise: see `Covariance.elementwise`."""
    first, second = cov.scale * moments.gain, moments.second
    rest = jnp.maximum(moments.variance - first**2 - second**2, 0)
    r, correlation = cov.token_correlation, cov.feature_correlation
    token_gram = (
        r * product_with_transposed(first, first)
        + r**2 * product_with_transposed(second, second)
        + jnp.diag(jnp.sum(rest, axis=1))
    )
    features = cov.features()
    if features.basis is None:
        return token_gram, FeatureGram(
            correlation * cov.over_tokens(first)
            + correlation**2 * cov.over_tokens(second)
            + jnp.diag(jnp.sum(weighted(rest, cov.pool), axis=0))
        )
    # A wide layer: every feature's average gain, and the rest of the variance by itself.
    average = average_gain(cov.scale, moments.gain, cov.pool)
    total = jnp.sum(weighted(moments.variance, cov.pool), axis=0)
    return token_gram, features.scaled(average, total)
