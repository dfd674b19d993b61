"""Layers of `Full`. Attention is exact for jointly Gaussian queries, keys and values (Isserlis).

Its softmax is linearised by its Jacobian. Memory: H^2 T^2 S^2 numbers for the scores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Full
from moment_jax.covariance.base import Cross
from moment_jax.covariance.numerics import nonnegative
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.layers import rules
from moment_jax.layers.dense import dense
from moment_jax.layers.params import AttentionParams, DenseParams
from moment_jax.layers.rules import Attending, Carry, ScoreNoise
from moment_jax.xla import materialized


def norm(
    mean: Array, cov: Full, *, epsilon: Array | float, order: int, centres: bool
) -> tuple[Array, Full, Carry]:
    """The rule of `layer_norm` and `rms_norm`: see there."""
    d = mean.shape[1]
    centring = jnp.eye(d, dtype=mean.dtype) - centres / d
    mean = mean @ centring
    blocks = centring @ cov.token_blocks() @ centring
    spread = jnp.mean(mean**2, axis=1, keepdims=True) + epsilon
    if order == 2:
        spread = spread + nonnegative(jnp.einsum("tdd->t", blocks))[:, None] / d
    inverse = jax.lax.rsqrt(spread)
    normal = mean * inverse
    out = normal
    if order == 2:
        # E[c / sqrt(Q)] for Q = |c|^2 / D + epsilon, to second order about q = E[Q].
        small = inverse**2 / d
        pulled = jnp.einsum("tde,te->td", blocks, normal)
        along = jnp.sum(normal * pulled, axis=1, keepdims=True) / d
        squares = jnp.sum(blocks**2, axis=(1, 2))[:, None]
        out = normal * (1 + 0.75 * small * (squares * small + 2 * along)) - pulled * small
    jacobian = centring[None] - normal[:, :, None] * normal[:, None, :] / d
    jacobian = jacobian * inverse[:, :, None]
    return out, cov.map_each(jacobian), lambda cross: cross.map_each(jacobian)


def attention(
    mean: Array, cov: Full, memory: tuple[Array, Full] | None, params: AttentionParams,
    attending: Attending,
) -> tuple[Array, Full, Carry]:  # fmt: skip
    """The rule of `attention` and `cross_attention`: see there."""
    h, mask, order, turns, scale, bias, noise, cap = attending
    own = memory is None
    source, source_cov = (mean, cov) if memory is None else memory
    inputs = (mean, cov, turns[0]), (source, source_cov, turns[1]), (source, source_cov, None)
    layers = params.query, params.key, params.value
    (q, qq), (k, kk), (v, vv) = (
        _projected(x, x_cov, layer, turn, h)
        for (x, x_cov, turn), layer in zip(inputs, layers, strict=True)
    )

    def shared(left: int, right: int) -> Array:
        """Covariance of two projections through the random input that they share."""
        first, second = layers[left].kernel.mean, layers[right].kernel.mean
        cross = jnp.einsum("ip,tisj,jq->tpsq", first, inputs[left][1].cov, second)
        cross = _rotate(_split_both(cross, h), inputs[left][2])
        return _transpose(_rotate(_transpose(cross), inputs[right][2]))

    kv = shared(1, 2)
    qk, qv = (shared(0, 1), shared(0, 2)) if own else (None, None)

    root = q.shape[2] ** 0.5
    scores = jnp.einsum("had,hcd->hac", q, k)
    if order == 2 and qk is not None:
        scores = scores + jnp.einsum("hadhcd->hac", qk)
    scores, of_scores = materialized(scores / root), _score_cov(q, k, qq, kk, qk)
    scores, bent = rules.scaled(scores, scale, bias), scale
    if scale is not None:
        of_scores = scale[..., None, None, None] * of_scores * scale[None, None, None]
    for each in noise:
        of_scores = of_scores + _noise_cov(each)
    if cap is not None:
        flat = Full.unchecked(of_scores.reshape(2 * (h * len(mean), len(source))))
        capped = cap(scores, flat.variance().reshape(scores.shape))
        flat = flat.elementwise(jax.tree.map(lambda x: x.reshape(flat.shape), capped))
        of_scores = flat.cov.reshape(of_scores.shape)
        scores, bent = capped.mean, capped.gain if bent is None else capped.gain * bent
    if order == 1:
        weights = masked_softmax(scores, mask)
    else:
        rows = jnp.einsum("hachaf->hacf", of_scores)
        half = 0.5 * jnp.einsum("hacc->hac", rows)
        contrasts = _Contrasts(rows - half[..., :, None] - half[..., None, :])
        weights = expected_softmax(scores, contrasts, mask)
    weights = materialized(weights)
    mixed = weights @ v

    # Cov[A_had, A_gbe] of A_had = sum_c W_hac v_hcd, exact for jointly Gaussian W and v.
    with_value = jnp.einsum("had,hcdgfe->hacgfe", q, kv)  # Cov[S_hac, v_gfe]
    if qv is not None:
        with_value = with_value + jnp.einsum("hcd,hadgfe->hacgfe", k, qv)
    with_value = with_value / root
    if bent is not None:
        with_value = bent[..., None, None, None] * with_value
    with_value = _through_softmax(weights, with_value)
    of_weights = _transpose(
        _through_softmax(weights, _transpose(_through_softmax(weights, of_scores)))
    )
    moment = vv + jnp.einsum("hcd,gfe->hcdgfe", v, v)
    by_scores = jnp.einsum("hacgbf,hcdgfe->hadgbe", of_weights, moment)
    by_values = jnp.einsum("hac,gbf,hcdgfe->hadgbe", weights, weights, vv)
    gain = jnp.ones_like(scores[:, :, :1])
    if order == 2:  # law of total variance: the softmax keeps a part of its Jacobian
        whole = jnp.einsum("hac,hcdhcd->ha", weights, moment)
        averaged = jnp.einsum("hadhad->ha", by_values) + jnp.sum(mixed**2, axis=2)
        gain, _ = rules.kept_jacobian(jnp.einsum("hadhad->ha", by_scores), whole, averaged)
        gain = gain[:, :, None]
        by_scores = gain[..., None, None, None] * by_scores * gain[None, None, None]
        with_value = gain[..., None, None, None] * with_value
    both = jnp.einsum("hacgfe,gbfhcd->hadgbe", with_value, with_value)
    half = jnp.einsum("hcd,gbf,hacgfe->hadgbe", v, weights, with_value)
    of_mixed = by_scores + by_values + both + half + _transpose(half)
    t, width = len(mean), h * q.shape[2]
    of_mixed = of_mixed.transpose(1, 0, 2, 4, 3, 5).reshape(t, width, t, width)
    if order == 2:
        mixed = mixed + jnp.einsum("hachcd->had", with_value)
    out, out_cov = dense(rules.merge_heads(mixed), Full.unchecked(of_mixed), params.output)

    def linearised(by_query: Array | None, by_source: Array | None) -> Array:
        """The change (T, D) of the output for changes of the input (T, D), and of the memory (S, D)."""
        slope, straight = jnp.zeros_like(scores), jnp.zeros_like(q)
        if by_query is not None:
            dq = rules.rotate(rules.split_heads(by_query @ params.query.kernel.mean, h), turns[0])
            slope = slope + jnp.einsum("had,hcd->hac", dq, k)
        if by_source is not None:
            dk = rules.rotate(rules.split_heads(by_source @ params.key.kernel.mean, h), turns[1])
            slope = slope + jnp.einsum("had,hcd->hac", q, dk)
            straight = weights @ rules.split_heads(by_source @ params.value.kernel.mean, h)
        slope = slope / root if bent is None else bent * slope / root
        slope = weights * (slope - jnp.sum(weights * slope, axis=2, keepdims=True))
        return rules.merge_heads(straight + gain * (slope @ v)) @ params.output.kernel.mean

    def carry(cross: Cross | None, with_memory: Cross | None = None) -> Cross:
        changes = cross, cross if own else with_memory
        given = [None if x is None else x.cov for x in changes]
        return Cross(jax.vmap(jax.vmap(linearised))(*given))

    return out, out_cov, carry


def _score_cov(q: Array, k: Array, qq: Array, kk: Array, qk: Array | None) -> Array:
    """Cov[q_ha . k_hc, q_gb . k_gf] / K, exact for jointly Gaussian q and k."""
    moment = qq + jnp.einsum("had,gbe->hadgbe", q, q)
    result = jnp.einsum("hadgbe,hcdgfe->hacgbf", moment, kk)
    result = result + jnp.einsum("hadgbe,hcd,gfe->hacgbf", qq, k, k)
    if qk is not None:
        # Cov[q_had, k_gfe] with Cov[k_hcd, q_gbe], and each with the means of the other two.
        result = result + jnp.einsum("hadgfe,gbehcd->hacgbf", qk, qk)
        half = jnp.einsum("had,gfe,gbehcd->hacgbf", q, k, qk)
        result = result + half + _transpose(half)
    return result / q.shape[2]


def _noise_cov(noise: ScoreNoise) -> Array:
    """Covariance of a random bias, (H, T, S, H, T, S)."""
    same = noise.places[..., None, None, None] == noise.places[None, None, None]
    factor = jnp.broadcast_to(noise.factor, noise.places.shape)
    spread = factor * noise.variance[noise.places]
    return jnp.where(same, spread[..., None, None, None] * factor[None, None, None], 0)


class _Contrasts(NamedTuple):
    """Covariance of each row's contrasts."""

    cov: Array  # (H, T, S, S)

    def variance(self) -> Array:
        return jnp.zeros((), self.cov.dtype)

    def matvec(self, vectors: Array) -> Array:
        return jnp.einsum("hacf,haf->hac", self.cov, vectors)

    def square_matvec(self, vectors: Array, unit: Array) -> Array:
        return jnp.einsum("hacf,haf->hac", (self.cov / unit[..., None]) ** 2, vectors)


def _projected(
    mean: Array, cov: Full, params: DenseParams, turn: Array | None, h: int
) -> tuple[Array, Array]:
    """All heads' queries, keys or values: mean (H, T, K), covariance (H, T, K, H, T, K)."""
    y, y_cov = dense(mean, cov, params)
    split = _rotate(_split_both(y_cov.cov, h), turn)
    return rules.rotate(rules.split_heads(y, h), turn), _rotate(_transpose(split), turn)


def _rotate(cov: Array, turn: Array | None) -> Array:
    """Multiply the first three axes, (H, T, K), by each token's (K, K) matrix."""
    return cov if turn is None else jnp.einsum("htjgse,tjk->htkgse", cov, turn)


def _split_both(cov: Array, num_heads: int) -> Array:
    """(T, H K, S, H K) -> (H, T, K, H, S, K)."""
    t, width, s, _ = cov.shape
    k = width // num_heads
    return cov.reshape(t, num_heads, k, s, num_heads, k).transpose(1, 0, 2, 4, 3, 5)


def _transpose(cov: Array) -> Array:
    """Transpose a cross-covariance: exchange its first three axes with its last three."""
    return jnp.transpose(cov, (3, 4, 5, 0, 1, 2))


def _through_softmax(weights: Array, cov: Array) -> Array:
    """Apply the softmax's Jacobian W_hac (1[c=f] - W_haf) to the first three axes."""
    weights = weights[..., None, None, None]
    centred = cov - jnp.sum(weights * cov, axis=2, keepdims=True)
    result: Any = weights * centred
    return result
