"""Normalisation of each token, in `Separable`."""

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import nonnegative, safe_divide, safe_sqrt
from moment_jax.covariance.separable import Separable, SeparableCross, agreeing
from moment_jax.covariance.token_gram import (
    count_of,
    diagonal_of,
    nystroem,
    product,
    right_scaled,
    row_sums,
    total,
)
from moment_jax.layers.rules import Carry


def norm(
    mean: Array, cov: Separable, *, epsilon: Array | float, order: int, centres: bool
) -> tuple[Array, Separable, Carry]:
    """The rule of `layer_norm` and `rms_norm`: see there.

    Every token's feature covariance is read as its energy G_tt / tr C times C, and its Jacobian as J_t
    = (P - n_t n_t^T / D) / sqrt(q_t), n the normalised mean and P the centring. Variances are those of
    J_t C J_t^T, C is in proportion to sum_ts p_t p_s G_ts J_t C J_s^T without the part of fourth order,
    and G keeps its correlations.
    """
    d, pool, features = mean.shape[1], cov.pool, cov.features
    before = diagonal_of(features)
    unit = safe_divide(jnp.ones((), cov.dtype), jnp.sum(before))
    energy = unit * diagonal_of(cov.tokens)[:, None]
    inner, own = features, before
    if centres:
        mean = mean - jnp.mean(mean, axis=1, keepdims=True)
        average = jnp.mean(features, axis=1)
        lost = average - 0.5 * jnp.mean(average)
        inner, own = features - lost[:, None] - lost[None, :], before - 2 * lost
    size = jnp.sum(own)
    spread = jnp.mean(mean**2, axis=1, keepdims=True) + epsilon
    if order == 2:
        spread = spread + energy * size / d
    inverse = jax.lax.rsqrt(spread)
    normal = mean * inverse
    linked = normal @ features
    mapped = linked - jnp.mean(linked, axis=1, keepdims=True) if centres else linked
    lost = jnp.sum(normal * mapped, axis=1, keepdims=True) / d
    out = normal
    if order == 2:
        # E[c / sqrt(Q)] for Q = |c|^2 / D + epsilon, to second order about q = E[Q].
        small = inverse**2 / d
        relative = 0.75 * small * energy * (energy * jnp.sum(inner**2) * small + 2 * lost)
        out = normal * (1 + relative) - energy * mapped * small
    # Lost variance is a factor, which keeps the result positive; gained variance is added.
    after = own[None] + normal * (normal * lost - 2 * mapped) / d
    gained = nonnegative(after - before[None])
    kept = nonnegative(after - gained) * safe_divide(
        cov.variances, jnp.broadcast_to(before, mean.shape)
    )
    variances = inverse**2 * (kept + energy * gained)

    left = unit * (size - lost)  # of a token's energy
    root = inverse * safe_sqrt(left)
    tokens = root * cov.tokens * root.T
    weights = pool[:, None] * inverse
    pairs = weights * cov.tokens * weights.T
    twice = nystroem(pairs * product(normal, mapped, count_of(pairs))) @ normal
    bend = row_sums(pairs) * mapped / d - twice / (2 * d**2)
    bent = normal.T @ bend
    summed = total(pairs) * inner - bent - bent.T

    variances = variances * safe_divide(
        diagonal_of(tokens)[:, None], jnp.sum(variances, axis=1, keepdims=True)
    )
    features = agreeing(summed, tokens, pool)

    def carry(cross: SeparableCross) -> SeparableCross:
        before = cross.features
        shares = cross.shares()[:, None] * inverse
        centred = before - jnp.mean(before, axis=1, keepdims=True) if centres else before
        along = (shares * (normal @ before.T)).T @ normal / d
        after = jnp.sum(shares) * centred - along
        kept = inverse * left
        after = safe_divide(after, jnp.sum(shares * left))
        return SeparableCross(right_scaled(cross.tokens, kept), after, cross.pools)

    return out, Separable.unchecked(variances, tokens, features, pool), carry
