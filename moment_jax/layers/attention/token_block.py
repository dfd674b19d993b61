"""Attention for `TokenBlock`: per-token blocks of all heads jointly, tokens independent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import TokenBlock
from moment_jax.expectations import expected_softmax
from moment_jax.layers.attention.inputs import (
    Centres,
    Inputs,
    Mixing,
    SharedInput,
    merge_heads,
    split_heads,
)
from moment_jax.layers.attention.mix import Output, mix
from moment_jax.layers.attention.places import at_own, own_tokens
from moment_jax.layers.attention.score_noise import left_within, saturation
from moment_jax.xla import product_with_transposed, rows_product


def mix_token_block(inputs: Inputs[TokenBlock]) -> tuple[Array, TokenBlock, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), token blocks, and weights (H, T, S)."""
    h, projections = inputs.num_heads, (inputs.query, inputs.key, inputs.value)
    q, k, v = (_head_blocks(p.cov, h) for p in projections)
    heads = _Heads(inputs.centres(), q, k, v, inputs.shared)
    mean, noise, mixing = mix(heads, inputs.mask, inputs.order)
    t, width = inputs.query.mean.shape
    return merge_heads(mean), TokenBlock(noise.reshape(t, width, width)), mixing


class _Heads(NamedTuple):
    """All heads, see `HeadMoments`; covariances are blocks (T, H, K, H, K)."""

    centres: Centres
    query: Array
    key: Array
    value: Array
    shared: SharedInput[TokenBlock]

    def shared_scores(self) -> Array | None:
        """With independent tokens, only a token's covariance with itself."""
        h, s, _ = self.centres.key.shape
        if self.shared.query_kernel is None:
            return None
        kernels = (split_heads(m, h) for m in (self.shared.query_kernel, self.shared.key_kernel))
        metric = jnp.einsum("hik,hjk->hij", *kernels)
        blocks = own_tokens(self.shared.cov.blocks, self.shared.places)
        own = jnp.einsum("tij,hij->ht", blocks, metric)
        return jax.vmap(lambda row: at_own(row, self.shared.places, s))(own)

    def rows(self) -> _Rows:
        """From noise in single keys, sum_dd' E[q_had q_gad'] Cov[k_hcd, k_gcd'], and of queries."""
        query, key, _ = self.centres
        width = query.shape[2]
        moment = self.query + jnp.einsum("had,gae->ahdge", query, query)
        pairs = _per_pair(product_with_transposed)(_pairs(moment), _pairs(self.key)) / width
        own = jnp.einsum("hhac->hac", pairs)
        return _Rows(pairs, own, jnp.einsum("ahdhe->hade", self.query) / width, key)

    def output(self, rows: _Rows, weights: Array, mean: Array, order: int) -> Output:
        """Cov[A_had, A_gae], (T, H, K, H, K), from queries, keys, values, and keys with values."""
        _, k, v = self.centres
        width = k.shape[2]
        # The derivative of A_had with respect to the scores, (H, T, S, K). Multiplying it out would lose
        # the noise of large scores in rows with all their weight on one key.
        change = weights[..., None] * (v[:, None] - mean[:, :, None])
        slope = jnp.einsum("hacd,hce->hade", change, k)
        by_query = jnp.einsum("hadp,ahpgq,gaeq->ahdge", slope, self.query, slope) / width
        # sum_c W_hac W_gac Cov[v_hc, v_gc], for each pair of heads.
        value_pairs = _pairs(self.value)
        both = jnp.einsum("hac,gac->hgac", weights, weights)
        by_value = _unpaired(_per_pair(rows_product)(both, value_pairs), width)
        by_scores = by_query + _by_key(rows.pairs, weights, both, change, value_pairs)
        if order == 2:
            second = jnp.sum(v**2, axis=2) + jnp.einsum("chdhd->hc", self.value)
            averaged = jnp.sum(mean**2, axis=2) + jnp.einsum("ahdhd->ha", by_value)
            within = left_within(jnp.einsum("hac,hc->ha", weights, second), averaged)
            gain = saturation(jnp.einsum("ahdhd->ha", by_scores), within).T
            by_scores = gain[:, :, None, None, None] * by_scores * gain[:, None, None, :, None]
        return Output(by_scores + by_value)


class _Rows(NamedTuple):
    """Covariance of a query's scores, with independent tokens.

    Cov[S_hac, S_gaf] = k_hc Cov[q_ha, q_ga] k_gf + 1[c=f] (q_ha Cov[k_hc, k_gc] q_ga + trace), over K.
    """

    pairs: Array  # the second part, from the keys' noise, (H, H, T, S)
    own: Array  # `pairs` of a head with itself, (H, T, S)
    query: Array  # Cov[q_ha] / K, (H, T, K, K)
    key: Array  # k, (H, S, K)

    def expected_softmax(self, scores: Array, mask: Array | None) -> Array:
        return expected_softmax(scores, self, mask)

    def _squares(self) -> Array:
        """K k^T, (H, S, K^2)."""
        return _flat(self.key[..., None] * self.key[:, :, None, :])

    def by_query(self) -> Array:
        return jax.vmap(product_with_transposed)(_flat(self.query), self._squares())

    def variance(self) -> Array:
        return self.own + self.by_query()

    def matvec(self, vectors: Array) -> Array:
        keys = jnp.einsum("haf,hfe->hae", vectors, self.key)
        common = jnp.einsum("hade,hae,hcd->hac", self.query, keys, self.key)
        return common + self.own * vectors

    def square_matvec(self, vectors: Array, unit: Array) -> Array:
        query, own = self.query / unit[..., None], self.own / unit
        keys = jax.vmap(rows_product)(vectors, self._squares()).reshape(query.shape)
        inner = jnp.einsum("hadi,haij,haej->hade", query, keys, query)
        common = jax.vmap(product_with_transposed)(_flat(inner), self._squares())
        return common + (own**2 + 2 * own * (self.by_query() / unit)) * vectors


def _head_blocks(cov: TokenBlock, num_heads: int) -> Array:
    """(T, H K, H K) -> (T, H, K, H, K)."""
    t, width = cov.shape
    k = width // num_heads
    return cov.blocks.reshape(t, num_heads, k, num_heads, k)


def _flat(array: Array) -> Array:
    """(..., K, K) -> (..., K^2)."""
    return array.reshape(*array.shape[:-2], -1)


def _pairs(blocks: Array) -> Array:
    """(T, H, K, H, K) -> (H, H, T, K^2), one matrix per pair of heads."""
    return _flat(blocks.transpose(1, 3, 0, 2, 4))


def _unpaired(pairs: Array, width: int) -> Array:
    """The inverse of `_pairs`, (H, H, T, K^2) -> (T, H, K, H, K)."""
    return pairs.reshape(*pairs.shape[:3], width, width).transpose(2, 0, 3, 1, 4)


def _per_pair(product: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Apply a product to each pair of heads."""
    return jax.vmap(jax.vmap(product))


def _by_key(pairs: Array, weights: Array, both: Array, change: Array, value_pairs: Array) -> Array:
    """sum_c W_hac W_gac pairs_hgac E[(v_hc - A_ha) (v_gc - A_ga)^T], (T, H, K, H, K).

    The average A is as random as its values, of which v_hc is one. Takes `pairs`, the noise of single
    keys, (H, H, T, S); `weights`, W, (H, T, S); `both`, W_hac W_gac, (H, H, T, S); `change`, W_hac
    (v_hc - A_ha) at the means, (H, T, S, K); and `value_pairs`, covariances of the values, (H, H, S,
    K^2).
    """
    pair = both * pairs
    others = pair @ (1 - jnp.eye(pair.shape[3], dtype=pair.dtype))  # subtracting could go negative
    random = pair * (1 - weights[:, None]) * (1 - weights[None]) + both * others
    by_mean = jnp.einsum("hgac,hacd,gace->ahdge", pairs, change, change)
    return by_mean + _unpaired(_per_pair(rows_product)(random, value_pairs), change.shape[3])
