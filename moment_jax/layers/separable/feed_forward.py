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
from moment_jax.xla import diagonal_matrix, diagonal_of


def feed_forward(
    mean: Array, cov: Separable, params: FeedForwardParams, activation: Moments
) -> tuple[Array, Separable, Carry]:
    """The rule of `feed_forward`: see there.

    For kernels of means M (D, F) and N (F, D), hidden units are read as energy times shares, G_tt s_f /
    sum s, with the variances s (F,) of their pooled sum: h, by x, and those of S, by noise. They are
    correlated through x alone, whose covariance passes through the Jacobian J = M diag(g) N, with one
    gain g (F,) of the activation for all tokens. So C becomes J^T C J + N^T S N plus the output kernel's
    noise, and no (F, F) matrix is formed, unless a kernel's entries are correlated.
    """
    hidden, output, p = params.hidden, params.output, cov.pool
    M, N, C, G = hidden.kernel.mean, output.kernel.mean, cov.features, cov.tokens
    bias = bias_cov(hidden.bias, M.shape[1], mean.dtype)

    # The hidden units. h is read off the diagonal of C, which saves a (D, D, F) product.
    c, count = diagonal_of(C), tg.count_of(G)
    h = c @ M**2
    S = kernel_noise(hidden.kernel, C, weighted_sum(p, mean)[None])
    S = summed_covs(S, jnp.sum(p) ** 2 * bias)
    Q = hidden.kernel.input_metric()
    size = jnp.sum(h) + jnp.sum(C * vector_cov(Q))
    G = G * safe_divide(size, jnp.sum(c)) + tg.gram(mean, Q, count) + jnp.sum(vector_variance(bias))
    s = h + vector_variance(S)
    variances = outer_by_share(tg.diagonal_of(G), s)

    # The activation: exact for single entries, by its gain between them.
    f = activation(hidden.mean_output(mean), variances)
    rest = nonnegative(f.variance - f.gain**2 * variances)
    g, alone = average_gain(p, G, f.gain), weighted_sum(p**2, rest)
    G = G * tg.gram(f.gain, safe_divide(s, jnp.sum(s)), count)
    G = tg.add_diagonal(G, jnp.sum(rest, axis=1))
    if S.ndim == 1:  # its covariances in the output are left out: they move nothing
        S = g**2 * S + alone
        NSN = S @ N**2
    else:
        S = g[:, None] * S * g[None, :] + diagonal_matrix(alone)
        NSN = numerics.gram(N.T, S)
    s = g**2 * h + vector_variance(S)

    # The output.
    J = (M * g[None, :]) @ N
    JCJ, Q = numerics.gram(J.T, C), output.kernel.input_metric()
    own = diagonal_of(JCJ) + vector_variance(NSN)
    size = jnp.sum(own) + s @ vector_variance(Q)
    G = G * safe_divide(size, jnp.sum(s)) + tg.gram(f.mean, Q, count)
    noise = kernel_noise(output.kernel, s, weighted_sum(p, f.mean)[None])
    variances = outer_by_share(tg.diagonal_of(G), own + vector_variance(noise))
    C = agreeing(summed_covs(JCJ, summed_covs(NSN, noise)), G, p)
    cov = with_bias(Separable.unchecked(variances, G, C, p), output.bias)
    return output.mean_output(f.mean), cov, lambda cross: cross.map_features(J)
