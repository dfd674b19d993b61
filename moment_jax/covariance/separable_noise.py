"""Noise of random parameters, and elementwise functions, in `Separable`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.base import ElementwiseGain, RandomKernel
from moment_jax.covariance.numerics import (
    fit_rows,
    gram,
    nonnegative,
    pooled,
    safe_divide,
    safe_sqrt,
    vector_variance,
    weighted,
)
from moment_jax.covariance.separable_grams import FeatureGram
from moment_jax.xla import (
    diagonal_matrix,
    diagonal_of,
    materialized,
)

if TYPE_CHECKING:
    from moment_jax.covariance.separable import Separable

# Variance (T, D), token Gram matrix (T, T), covariance of the sum over tokens (D, D).
Moments = tuple[Array, Array, FeatureGram]


def kernel(cov: Separable, mean: Array, weights: RandomKernel) -> Moments:
    """The contribution of a random kernel to the covariance: see `Covariance.weight_noise`."""
    metric, features, total = weights.input_metric(), cov.features(), pooled(mean, cov.pool)
    of_noise = cov.token_gram(metric)
    token_gram = of_noise + gram(mean, metric)
    if weights.uncorrelated:  # feature correlations are neither needed nor produced
        variance = weights.noise_variance(mean, cov.variance())
        return variance, token_gram, column_noise(weights, features.diag() + total**2)
    none = materialized(jnp.zeros_like(mean))  # `matmul`'s kernel multiplies by it from the right
    # The variances due to noise in x get the pattern that uncorrelated features would give.
    by_noise = weights.noise_block(features.dense())
    expected = weights.noise_variance(none[:1], features.diag()[None, :])[0]
    pattern = weights.noise_variance(none, cov.variance())
    pattern = pattern * safe_divide(diagonal_of(by_noise), expected)[None, :]
    variance = weights.noise_variance(mean, none) + fit_rows(pattern, diagonal_of(of_noise))
    by_mean = weights.noise_block(total[:, None] * total[None, :])
    return variance, token_gram, FeatureGram(by_mean + by_noise)


def column_noise(kernel: RandomKernel, moment: Array) -> FeatureGram:
    """Feature Gram matrix of the noise of a (D, O) kernel with uncorrelated entries.

    `moment` is E[(sum_t p_t x_td)^2], (D,).
    """
    moment = moment[None, :]
    return FeatureGram(diagonal=kernel.noise_variance(jnp.zeros_like(moment), moment)[0])


def gain(cov: Separable, mean: Array, gain_cov: Array) -> Moments:
    """The contribution of a random gain that all tokens share: see `Covariance.gain_noise`."""
    metric, features, total = vector_variance(gain_cov), cov.features(), pooled(mean, cov.pool)
    variance = (cov.variance() + mean**2) * metric[None, :]
    token_gram = cov.token_gram(metric) + gram(mean, metric)
    if gain_cov.ndim == 1:
        return variance, token_gram, FeatureGram(diagonal=(features.diag() + total**2) * gain_cov)
    moment = features.dense() + total[:, None] * total[None, :]
    return variance, token_gram, FeatureGram(moment * gain_cov)


def elementwise(cov: Separable, moments: ElementwiseGain) -> tuple[Array, FeatureGram]:
    """Token Gram matrix and covariance of the sum of f(x): see `Covariance.elementwise`.

    In a wide layer, whose features are in factored form, the second coefficients correlate no tokens.
    Budget: that moves no figure of the sampled cases by more than .0002.
    """
    first, second = cov.scale * moments.gain, moments.second
    rest = nonnegative(moments.variance - first**2 - second**2)
    r, features = cov.token_correlation, cov.features()
    wide = features.basis is not None
    token_gram = r * gram(first)
    if not wide:
        token_gram = token_gram + r**2 * gram(second)
    own = rest + second**2 if wide else rest
    token_gram = token_gram + diagonal_matrix(jnp.sum(own, axis=1))
    first, second = weighted(first, cov.pool), weighted(second, cov.pool)
    rest = jnp.sum(weighted(weighted(rest, cov.pool), cov.pool), axis=0)
    if not wide:
        correlation = cov.feature_correlation
        return token_gram, FeatureGram(
            correlation * gram(first.T, r)
            + correlation**2 * gram(second.T, r**2)
            + diagonal_matrix(rest)
        )
    # One gain per feature; the remaining variance goes to the diagonal.
    features = features.rescaled(average_gain(cov, moments.gain))
    return token_gram, features.raised(_coherent(second, r**2) + rest)


def average_gain(cov: Separable, gain: Array) -> Array:
    """Average of a gain (T, D) over tokens, per feature, (D,); exact for a scale of rank one."""
    rows = weighted(cov.scale, cov.pool)
    size = safe_sqrt(jnp.sum(rows**2, axis=1))
    shares = rows * (cov.token_correlation @ size)[:, None]
    return safe_divide(jnp.sum(shares * gain, axis=0), jnp.sum(shares, axis=0))


def sum_variance(cov: Separable, weights: Array, known: Array) -> Array:
    """Variances of a weighted sum over tokens, (D,); exact for multiples of the pool.

    Takes the tokens' weights (T,) and the known variances of the pooled sum, (D,).
    """

    def alone(weights: Array | None) -> Array:  # as if tokens were independent
        return jnp.sum(weighted(cov.scale, weights) ** 2, axis=0)

    # Scale the part that tokens share by what the token correlation predicts.
    own, before = alone(weights), alone(cov.pool)
    common = cov.pooled_variance(weights) - own
    share = safe_divide(common, cov.pooled_variance() - before)
    largest = jnp.sum(jnp.abs(weighted(cov.scale, weights)), axis=0) ** 2
    return jnp.clip(own + share * (known - before), 0, largest)


def _coherent(rows: Array, correlation: Array) -> Array:
    """sum_ts rows_td correlation_ts rows_sd, (D,), for rows of rank one."""
    size = safe_sqrt(jnp.sum(rows**2, axis=1))
    shares = correlation @ size
    total = jnp.broadcast_to(jnp.sum(size * shares), rows.shape[1:])
    return safe_divide(jnp.sum(rows * shares[:, None], axis=0) ** 2, total)
