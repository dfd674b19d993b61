"""Normalisation of each token, in `Separable`."""

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import token_gram as tg
from moment_jax.covariance.cross import SeparableCross
from moment_jax.covariance.numerics import nonnegative, safe_divide, safe_sqrt
from moment_jax.covariance.separable import Separable, agreeing
from moment_jax.layers.rules import Carry
from moment_jax.xla import diagonal_of


def norm(
    mean: Array, cov: Separable, *, epsilon: Array | float, order: int, centres: bool
) -> tuple[Array, Separable, Carry]:
    """The rule of `layer_norm` and `rms_norm`: see there.

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
        mean = mean - jnp.mean(mean, axis=1, keepdims=True)
        average = jnp.mean(C, axis=1)
        lost = average - 0.5 * jnp.mean(average)
        PCP, own = C - lost[:, None] - lost[None, :], c - 2 * lost
    size = jnp.sum(own)
    q = jnp.mean(mean**2, axis=1, keepdims=True) + epsilon
    if order == 2:
        q = q + e * size / d
    r = jax.lax.rsqrt(q)
    n = mean * r
    nCP = n @ C
    if centres:
        nCP = nCP - jnp.mean(nCP, axis=1, keepdims=True)
    nCn = jnp.sum(n * nCP, axis=1, keepdims=True) / d
    out = n
    if order == 2:
        # E[P x / sqrt(Q)] for Q = |P x|^2 / D + epsilon, to second order about q = E[Q].
        small = r**2 / d
        out = n * (1 + 0.75 * small * e * (e * jnp.sum(PCP**2) * small + 2 * nCn)) - e * nCP * small

    # Variances. What is lost is a factor, which keeps the result positive; what is gained is added.
    after = own[None] + n * (n * nCn - 2 * nCP) / d
    gained = nonnegative(after - c[None])
    kept = nonnegative(after - gained)
    kept = kept * safe_divide(cov.variances, jnp.broadcast_to(c, mean.shape))
    variances = r**2 * (kept + e * gained)
    left = unit * (size - nCn)  # of a token's energy
    root = r * safe_sqrt(left)
    tokens = root * G * root.T
    variances = variances * safe_divide(
        tg.diagonal_of(tokens)[:, None], jnp.sum(variances, axis=1, keepdims=True)
    )

    weights = p[:, None] * r
    pGp = weights * G * weights.T  # pairs of tokens in the pooled sum
    twice = tg.factored(pGp * tg.product(n, nCP, tg.count_of(pGp))) @ n
    bent = n.T @ (tg.row_sums(pGp) * nCP / d - twice / (2 * d**2))
    features = agreeing(tg.total(pGp) * PCP - bent - bent.T, tokens, p)

    def carry(cross: SeparableCross) -> SeparableCross:
        F = cross.features
        shares = cross.shares()[:, None] * r
        FP = F - jnp.mean(F, axis=1, keepdims=True) if centres else F
        along = (shares * (n @ F.T)).T @ n / d
        after = safe_divide(jnp.sum(shares) * FP - along, jnp.sum(shares * left))
        return SeparableCross(tg.right_scale(cross.tokens, r * left), after, cross.pools)

    return out, Separable.unchecked(variances, tokens, features, p), carry
