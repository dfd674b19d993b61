"""Attention for `Full`: exact moments of products of jointly Gaussian arrays (Isserlis)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Full
from moment_jax.expectations import expected_softmax
from moment_jax.layers.attention.inputs import (
    Centres,
    Inputs,
    Mixing,
    merge_heads,
    root_width,
)
from moment_jax.layers.attention.mix import Output, mix
from moment_jax.layers.attention.rows import centred
from moment_jax.layers.attention.score_noise import left_within, saturation


def mix_full(inputs: Inputs[Full]) -> tuple[Array, Full, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), covariance, and weights (H, T, S).

    Products of jointly Gaussian scores and values are exact; the softmax is linearised by its Jacobian.
    Memory: H^2 T^2 S^2 numbers for the scores.
    """
    mean, cov, mixing = mix(_Joint.of(inputs), inputs.mask, inputs.order)
    t, width = inputs.query.mean.shape
    cov = cov.transpose(1, 0, 2, 4, 3, 5).reshape(t, width, t, width)
    return merge_heads(mean), Full(cov), mixing


class _Joint(NamedTuple):
    """All heads, see `HeadMoments`: covariances (H, T, K, H, T, K) of queries, keys and values.

    `qk` and `qv` are None if queries come from another sequence.
    """

    centres: Centres
    qq: Array
    kk: Array
    vv: Array
    qk: Array | None
    qv: Array | None
    kv: Array

    @classmethod
    def of(cls, inputs: Inputs[Full]) -> _Joint:
        """Build from the projections and their shared input."""
        h, shared, (turn_q, turn_k) = inputs.num_heads, inputs.shared, inputs.shared.turns
        qq, kk, vv = (_split_both(p.cov.cov, h) for p in (inputs.query, inputs.key, inputs.value))

        def cross(left: Array | None, right: Array) -> Array | None:
            if left is None:
                return None
            return _split_both(jnp.einsum("ip,tisj,jq->tpsq", left, shared.cov.cov, right), h)

        query, key, value = shared.query_kernel, shared.key_kernel, shared.value_kernel
        qk = _turned(_turned(cross(query, key), turn_q, 0), turn_k, 3)
        qv, kv = _turned(cross(query, value), turn_q, 0), _turned(cross(key, value), turn_k, 0)
        assert kv is not None
        return cls(inputs.centres(), qq, kk, vv, qk, qv, kv)

    def shared_scores(self) -> Array | None:
        """Sum_d Cov[q_had, k_hcd]."""
        return None if self.qk is None else jnp.einsum("hadhcd->hac", self.qk)

    def rows(self) -> _Rows:
        """Cov[q_ha . k_hc, q_gb . k_gf] / K, exact for jointly Gaussian q and k."""
        (q, k, _), qq, kk, qk = self.centres, self.qq, self.kk, self.qk
        result = jnp.einsum(
            "hadgbe,hcdgfe->hacgbf", qq + jnp.einsum("had,gbe->hadgbe", q, q), kk
        ) + jnp.einsum("hadgbe,hcd,gfe->hacgbf", qq, k, k)
        if qk is not None:
            # Cov[q_had, k_gfe] with Cov[k_hcd, q_gbe], and each with the means of the other two.
            result = (
                result
                + jnp.einsum("hadgfe,gbehcd->hacgbf", qk, qk)
                + jnp.einsum("had,gfe,gbehcd->hacgbf", q, k, qk)
                + jnp.einsum("hcd,gbe,hadgfe->hacgbf", k, q, qk)
            )
        return _Rows(result / q.shape[2])

    def score_value(self) -> Array:
        """Cov[S_hac, v_gfe], (H, T, S, H, S, K)."""
        result = jnp.einsum("had,hcdgfe->hacgfe", self.centres.query, self.kv)
        if self.qv is not None:
            result = result + jnp.einsum("hcd,hadgfe->hacgfe", self.centres.key, self.qv)
        return result / root_width(self.centres.query)

    def output(self, rows: _Rows, weights: Array, mean: Array, order: int) -> Output:
        """Cov[A_had, A_gbe] of A_had = sum_c W_hac v_hcd, exact for jointly Gaussian W and v."""
        v, vv = self.centres.value, self.vv
        by_rows = _through_softmax(weights, rows.cov)
        weight_cov = _swap(_through_softmax(weights, _swap(by_rows)))
        weight_value = _through_softmax(weights, self.score_value())
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
        both = jnp.einsum("hacgfe,gbfhcd->hadgbe", weight_value, weight_value)
        half = jnp.einsum("hcd,gbf,hacgfe->hadgbe", v, weights, weight_value)
        cov = by_scores + by_values + both + half + _swap(half)
        return Output(cov, kept, jnp.einsum("hachcd->had", weight_value))


class _Rows(NamedTuple):
    """Covariance of the scores."""

    cov: Array  # (H, T, S, H, T, S)

    def expected_softmax(self, scores: Array, mask: Array | None) -> Array:
        own = jax.vmap(jax.vmap(centred))(jnp.einsum("hachaf->hacf", self.cov))
        return expected_softmax(scores, _Contrasts(own), mask)


class _Contrasts(NamedTuple):
    """Covariance of each row's contrasts."""

    cov: Array  # (H, T, S, S)

    def variance(self) -> Array:
        return jnp.zeros((), self.cov.dtype)

    def matvec(self, vectors: Array) -> Array:
        return jnp.einsum("hacf,haf->hac", self.cov, vectors)

    def square_matvec(self, vectors: Array, unit: Array) -> Array:
        return jnp.einsum("hacf,haf->hac", (self.cov / unit[..., None]) ** 2, vectors)


def _turned(cov: Array | None, turn: Array | None, axis: int) -> Array | None:
    """Multiply queries or keys, whose axes (H, T, K) begin at `axis`, by each token's (K, K)."""
    if cov is None or turn is None:
        return cov
    return jnp.einsum("htjgse,tjk->htkgse" if axis == 0 else "htdgsj,sjk->htdgsk", cov, turn)


def _split_both(cov: Array, num_heads: int) -> Array:
    """(T, H K, S, H K) -> (H, T, K, H, S, K)."""
    t, width, s, _ = cov.shape
    k = width // num_heads
    return cov.reshape(t, num_heads, k, s, num_heads, k).transpose(1, 0, 2, 4, 3, 5)


def _swap(cov: Array) -> Array:
    """Transpose a cross-covariance: exchange its first three axes with its last three."""
    return jnp.transpose(cov, (3, 4, 5, 0, 1, 2))


def _through_softmax(weights: Array, cov: Array) -> Array:
    """Apply the softmax's Jacobian W_hac (1[c=f] - W_haf) to the first three axes."""
    weights = weights[..., None, None, None]
    centred = cov - jnp.sum(weights * cov, axis=2, keepdims=True)
    return weights * centred
