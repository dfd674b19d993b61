"""Attention for `Full`: all heads, tokens and features jointly, by Gaussian products (Isserlis)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance import Full
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.layers.attention.inputs import Inputs, Mixing, split_heads
from moment_jax.layers.attention.rows import centred, left_within, saturation

Array = jax.Array


class _Joint(NamedTuple):
    """Means (H, T, K) and covariances (H, T, K, H, T, K) of queries, keys and values, jointly.

    Those of the queries with the rest are None where the queries are made of another sequence.
    """

    q: Array
    k: Array
    v: Array
    qq: Array
    kk: Array
    vv: Array
    qk: Array | None
    qv: Array | None
    kv: Array


class _Rows(NamedTuple):
    """Covariance of every row of scores, (H, T, S, S)."""

    cov: Array

    def variance(self) -> Array:
        return jnp.einsum("hacc->hac", self.cov)

    def matvec(self, vectors: Array) -> Array:
        return jnp.einsum("hacf,haf->hac", self.cov, vectors)

    def square_matvec(self, vectors: Array, unit: Array) -> Array:
        return jnp.einsum("hacf,haf->hac", (self.cov / unit[..., None]) ** 2, vectors)


def mix_full(inputs: Inputs[Full]) -> tuple[Array, Full, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), full covariance, and weights (H, T, S).

    Scores and values are products of jointly Gaussian arrays, whose moments are exact; the softmax
    passes its Jacobian. Memory: H^2 T^2 S^2 numbers for the scores.
    """
    joint = _joint(inputs)
    width = joint.q.shape[2]
    root = jnp.sqrt(jnp.asarray(width, joint.q.dtype))
    scores = jnp.einsum("had,hcd->hac", joint.q, joint.k)
    if joint.qk is not None and inputs.order == 2:
        scores = scores + jnp.einsum("hadhcd->hac", joint.qk)
    scores = scores / root
    score_cov = _score_cov(joint) / width
    if inputs.order == 1:
        weights = masked_softmax(scores, inputs.mask)
    else:
        rows = _Rows(jax.vmap(jax.vmap(centred))(jnp.einsum("hachaf->hacf", score_cov)))
        weights = expected_softmax(scores, rows, inputs.mask)
    weight_cov = _through_softmax(weights, _swap(_through_softmax(weights, _swap(score_cov))))
    weight_value = _through_softmax(weights, _score_value_cov(joint) / root)
    mean, cov, gain = _output(joint, weights, weight_cov, weight_value, inputs.order)
    return mean, cov, Mixing(weights, gain)


def _joint(inputs: Inputs[Full]) -> _Joint:
    h = inputs.num_heads
    q, k, v = (split_heads(p.mean, h) for p in (inputs.query, inputs.key, inputs.value))
    qq, kk, vv = (_split_both(p.cov.cov, h) for p in (inputs.query, inputs.key, inputs.value))
    shared = inputs.shared
    query = shared.query_kernel

    def cross(left: Array, right: Array) -> Array:
        return _split_both(jnp.einsum("ip,tisj,jq->tpsq", left, shared.cov.cov, right), h)

    turn_q, turn_k = shared.turns

    def on_left(cov: Array, turn: Array | None) -> Array:
        return cov if turn is None else jnp.einsum("htjgse,tjk->htkgse", cov, turn)

    def on_right(cov: Array, turn: Array | None) -> Array:
        return cov if turn is None else jnp.einsum("htdgsj,sjk->htdgsk", cov, turn)

    return _Joint(
        q,
        k,
        v,
        qq,
        kk,
        vv,
        None
        if query is None
        else on_right(on_left(cross(query, shared.key_kernel), turn_q), turn_k),
        None if query is None else on_left(cross(query, shared.value_kernel), turn_q),
        on_left(cross(shared.key_kernel, shared.value_kernel), turn_k),
    )


def _split_both(cov: Array, num_heads: int) -> Array:
    """(T, H K, S, H K) -> (H, T, K, H, S, K)."""
    t, width, s, _ = cov.shape
    k = width // num_heads
    return cov.reshape(t, num_heads, k, s, num_heads, k).transpose(1, 0, 2, 4, 3, 5)


def _score_cov(joint: _Joint) -> Array:
    """Cov[q_ha . k_hc, q_gb . k_gf], (H, T, S, H, T, S), exact for jointly Gaussian q and k."""
    q, k, qq, kk, qk = joint.q, joint.k, joint.qq, joint.kk, joint.qk
    result = jnp.einsum(
        "hadgbe,hcdgfe->hacgbf", qq + jnp.einsum("had,gbe->hadgbe", q, q), kk
    ) + jnp.einsum("hadgbe,hcd,gfe->hacgbf", qq, k, k)
    if qk is None:
        return result
    # Cov[q_had, k_gfe] with Cov[k_hcd, q_gbe], and each with the means of the other two.
    return (
        result
        + jnp.einsum("hadgfe,gbehcd->hacgbf", qk, qk)
        + jnp.einsum("had,gfe,gbehcd->hacgbf", q, k, qk)
        + jnp.einsum("hcd,gbe,hadgfe->hacgbf", k, q, qk)
    )


def _score_value_cov(joint: _Joint) -> Array:
    """Cov[q_ha . k_hc, v_gfe], (H, T, S, H, S, K)."""
    by_key = jnp.einsum("had,hcdgfe->hacgfe", joint.q, joint.kv)
    if joint.qv is None:
        return by_key
    return by_key + jnp.einsum("hcd,hadgfe->hacgfe", joint.k, joint.qv)


def _swap(cov: Array) -> Array:
    """The transposed cross-covariance: the first three axes and the last three change places."""
    return jnp.transpose(cov, (3, 4, 5, 0, 1, 2))


def _through_softmax(weights: Array, cov: Array) -> Array:
    """The softmax's Jacobian W_hac (1[c=f] - W_haf) applied to the first three axes of cov."""
    weights = weights[..., None, None, None]
    centred = cov - jnp.sum(weights * cov, axis=2, keepdims=True)
    return weights * centred


def _output(
    joint: _Joint, weights: Array, weight_cov: Array, weight_value: Array, order: int
) -> tuple[Array, Full, Array | None]:
    """Moments of A_had = sum_c W_hac v_hcd, exact for jointly Gaussian weights and values."""
    v, vv = joint.v, joint.vv
    mean = jnp.einsum("hac,hcd->had", weights, v)
    moment = vv + jnp.einsum("hcd,gfe->hcdgfe", v, v)
    by_scores = jnp.einsum("hacgbf,hcdgfe->hadgbe", weight_cov, moment)
    by_values = jnp.einsum("hac,gbf,hcdgfe->hadgbe", weights, weights, vv)
    kept = None
    if order == 2:
        second = jnp.einsum("hcdhcd->hc", moment)
        averaged = jnp.einsum("hadhad->ha", by_values) + jnp.sum(mean**2, axis=2)
        within = left_within(jnp.einsum("hac,hc->ha", weights, second), averaged)
        kept = saturation(jnp.einsum("hadhad->ha", by_scores), within)
        gain = kept[:, :, None]
        by_scores = gain[..., None, None, None] * by_scores * gain[None, None, None]
        weight_value = gain[..., None, None, None] * weight_value
        mean = mean + jnp.einsum("hachcd->had", weight_value)
    both = jnp.einsum("hacgfe,gbfhcd->hadgbe", weight_value, weight_value)
    half = jnp.einsum("hcd,gbf,hacgfe->hadgbe", v, weights, weight_value)
    cov = by_scores + by_values + both + half + _swap(half)
    h, t, k = mean.shape
    cov = cov.transpose(1, 0, 2, 4, 3, 5).reshape(t, h * k, t, h * k)
    return mean.swapaxes(0, 1).reshape(t, h * k), Full(cov), kept
