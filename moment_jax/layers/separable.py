"""Normalisation and the feed-forward layer in `Separable`, each as one formula."""

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import numerics
from moment_jax.covariance import token_gram as tg
from moment_jax.covariance.numerics import nonnegative, safe_divide, safe_sqrt, vector_variance
from moment_jax.covariance.separable import Separable, SeparableCross, agreeing
from moment_jax.expectations.activations import Formula
from moment_jax.layers.params import FeedForwardParams, bias_cov, with_bias
from moment_jax.layers.rules import Carry, normalized, normalized_mean
from moment_jax.xla import diagonal_matrix, diagonal_of


def norm(
    mean: Array, cov: Separable, *, epsilon: Array | float, centres: bool
) -> tuple[Array, Separable, Carry]:
    """The rule of `layer_norm`: see there.

    Every token's feature covariance is read as e_t C, e_t = G_tt / tr C, and its Jacobian as J_t = (P -
    n_t n_t^T / D) / sqrt(q_t), with q_t the expected sample variance, n = P x / sqrt(q) the normalised
    mean and P the centring (or I). Variances are those of J_t C J_t^T, C becomes sum_ts p_t p_s G_ts
    J_t C J_s^T in proportion, without the part of fourth order in n, and G keeps its correlations.
    """
    d, p, C, G = mean.shape[1], cov.pool, cov.features, cov.tokens
    c = diagonal_of(C)
    unit = safe_divide(jnp.ones((), cov.dtype), jnp.sum(c))
    e = unit * tg.diagonal_of(G)[:, None]
    PCP, own = C, c  # own: the diagonal of P C P
    if centres:
        average = jnp.mean(C, axis=1)
        lost = average - 0.5 * jnp.mean(average)
        PCP, own = C - lost[:, None] - lost[None, :], c - 2 * lost
    size = jnp.sum(own)
    n, r = normalized(mean, e * size / d, epsilon, centres)
    nC = nCP = n @ C
    if centres:
        nCP = nCP - jnp.mean(nCP, axis=1, keepdims=True)
    nCn = jnp.sum(n * nCP, axis=1, keepdims=True) / d
    out = normalized_mean(n, r, e * nCP, e * nCn, e**2 * jnp.sum(PCP**2))

    # Variances. What is lost is a factor, which keeps the result positive; what is gained is added.
    after = own[None] + n * (n * nCn - 2 * nCP) / d
    gained = nonnegative(after - c[None])
    kept = nonnegative(after - gained)
    kept = kept * safe_divide(cov.variances, jnp.broadcast_to(c, mean.shape))
    variances = r**2 * (kept + e * gained)
    left = unit * (size - nCn)  # of a token's energy
    root = r * safe_sqrt(left)
    tokens = root * G * root.T
    summed = jnp.sum(variances, axis=1, keepdims=True)
    variances = variances * safe_divide(tg.diagonal_of(tokens)[:, None], summed)

    weights = p[:, None] * r
    pGp = weights * G * weights.T  # pairs of tokens in the pooled sum
    twice = tg.factored(pGp * tg.product(n, nCP, tg.count_of(pGp))) @ n
    bent = n.T @ (tg.row_sums(pGp) * nCP / d - twice / (2 * d**2))
    features = agreeing(tg.total(pGp) * PCP - bent - bent.T, tokens, p)

    def carry(cross: SeparableCross) -> SeparableCross:
        F = cross.features
        shares = cross.shares()[:, None] * r
        FP = F - jnp.mean(F, axis=1, keepdims=True) if centres else F
        nF = nC if F is C else n @ F.T  # of the input with itself: the product above
        along = (shares * nF).T @ n / d
        after = safe_divide(jnp.sum(shares) * FP - along, jnp.sum(shares * left))
        return SeparableCross(tg.right_scale(cross.tokens, r * left), after, cross.pools)

    return out, Separable.unchecked(variances, tokens, features, p), carry


def feed_forward(
    mean: Array, cov: Separable, params: FeedForwardParams, activation: Formula
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
    S = numerics.kernel_noise(hidden.kernel, C, numerics.weighted_sum(p, mean)[None])
    S = numerics.summed_covs(S, jnp.sum(p) ** 2 * bias)
    Q = hidden.kernel.input_metric()
    size = jnp.sum(h) + jnp.sum(C * numerics.vector_cov(Q))
    G = G * safe_divide(size, jnp.sum(c)) + tg.gram(mean, Q, count) + jnp.sum(vector_variance(bias))
    s = h + vector_variance(S)
    variances = numerics.outer_by_share(tg.diagonal_of(G), s)

    # The activation: exact for single entries; between them by its gain, of which each token has the
    # share that it has in the pooled sum.
    f = activation(hidden.mean_output(mean), variances)
    rest = nonnegative(f.variance - f.gain**2 * variances)
    shares, alone = p * tg.vecmat(p, G), numerics.weighted_sum(p**2, rest)
    g = safe_divide(shares @ f.gain, jnp.sum(shares))
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
    noise = numerics.kernel_noise(output.kernel, s, numerics.weighted_sum(p, f.mean)[None])
    variances = numerics.outer_by_share(tg.diagonal_of(G), own + vector_variance(noise))
    C = agreeing(numerics.summed_covs(JCJ, numerics.summed_covs(NSN, noise)), G, p)
    cov = with_bias(Separable.unchecked(variances, G, C, p), output.bias)
    return output.mean_output(f.mean), cov, lambda cross: cross.map_features(J)
