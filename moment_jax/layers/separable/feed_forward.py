"""The feed-forward layer in `Separable`, as one formula."""

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import numerics
from moment_jax.covariance import token_gram as tg
from moment_jax.covariance.numerics import (
    nonnegative,
    safe_divide,
    summed_covs,
    vector_cov,
    vector_variance,
    weighted_sum,
)
from moment_jax.covariance.separable import (
    Separable,
    agreeing,
    average_gain,
    kernel_noise,
    outer_by_share,
)
from moment_jax.layers.params import FeedForwardParams, bias_cov, with_bias
from moment_jax.layers.rules import Carry, Moments
from moment_jax.xla import diagonal_matrix


def feed_forward(
    mean: Array, cov: Separable, params: FeedForwardParams, activation: Moments
) -> tuple[Array, Separable, Carry]:
    """The rule of `feed_forward`: see there.

    The hidden layer is read as energy times shares, G_tt C_ff / tr C, and its features as correlated
    through x alone, whose covariance passes through the Jacobian with one gain a hidden unit, (D, D).
    So no (F, F) matrix is formed, unless a kernel's entries are correlated.
    """
    hidden, output, pool = params.hidden, params.output, cov.pool
    first, second = hidden.kernel.mean, output.kernel.mean
    hidden_bias = bias_cov(hidden.bias, first.shape[1], mean.dtype)

    # Hidden units: token Gram matrix (T, T); variances of the sum, by x and by noise, (F,). Those by x
    # are read off the diagonal of C, which saves a (D, D, F) product.
    before = tg.diagonal_of(cov.features)
    own = before @ first**2
    noise = kernel_noise(hidden.kernel, cov.features, weighted_sum(pool, mean)[None])
    noise = summed_covs(noise, jnp.sum(pool) ** 2 * hidden_bias)
    metric = hidden.kernel.input_metric()
    size = jnp.sum(own) + jnp.sum(cov.features * vector_cov(metric))
    tokens = cov.tokens * safe_divide(size, jnp.sum(before))
    tokens = (
        tokens + tg.gram(mean, metric, tg.count_of(tokens)) + jnp.sum(vector_variance(hidden_bias))
    )
    variances = outer_by_share(tg.diagonal_of(tokens), own + vector_variance(noise))

    # The activation: exact for single entries, by its gain between them.
    moments = activation(hidden.mean_output(mean), variances)
    rest = nonnegative(moments.variance - moments.gain**2 * variances)
    shares = safe_divide(own + vector_variance(noise), jnp.sum(own + vector_variance(noise)))
    gain = average_gain(pool, tokens, moments.gain)
    tokens = tokens * tg.gram(moments.gain, shares, tg.count_of(tokens))
    tokens = tg.add_diagonal(tokens, jnp.sum(rest, axis=1))
    remaining = weighted_sum(pool**2, rest)
    active = gain**2 * own
    if noise.ndim == 1:  # its covariances in the output are left out: they move nothing
        noise = gain**2 * noise + remaining
        by_noise = noise @ second**2
    else:
        noise = gain[:, None] * noise * gain[None, :] + diagonal_matrix(remaining)
        by_noise = numerics.gram(second.T, noise)
    active = active + vector_variance(noise)

    # The output.
    jacobian = (first * gain[None, :]) @ second
    features = numerics.gram(jacobian.T, cov.features)
    variance = tg.diagonal_of(features) + vector_variance(by_noise)
    pooled = weighted_sum(pool, moments.mean)[None]
    metric = output.kernel.input_metric()
    size = jnp.sum(variance) + active @ vector_variance(metric)
    tokens = tokens * safe_divide(size, jnp.sum(active))
    tokens = tokens + tg.gram(moments.mean, metric, tg.count_of(tokens))
    by_kernel = kernel_noise(output.kernel, active, pooled)
    variances = outer_by_share(tg.diagonal_of(tokens), variance + vector_variance(by_kernel))
    features = summed_covs(features, summed_covs(by_noise, by_kernel))
    features = agreeing(features, tokens, pool)
    cov = with_bias(Separable.unchecked(variances, tokens, features, pool), output.bias)
    return output.mean_output(moments.mean), cov, lambda cross: cross.map_features(jacobian)
