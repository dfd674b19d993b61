"""Attention for `TokenBlock`: exact per-token blocks, all heads jointly, tokens independent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance import TokenBlock
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.layers.attention.inputs import Inputs, Mixing, SharedInput, merge_heads, split_heads
from moment_jax.layers.attention.places import at_own, own_tokens
from moment_jax.layers.attention.rows import left_within, saturation
from moment_jax.xla import product_with_transposed, rows_product

Array = jax.Array


def mix_token_block(inputs: Inputs[TokenBlock]) -> tuple[Array, TokenBlock, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), token blocks, and weights (H, T, S).

    With independent tokens the covariance of a query's scores is
    Cov[S_hac, S_gaf] = k_hc Cov[q_ha, q_ga] k_gf + 1[c=f] (q_ha Cov[k_hc, k_gc] q_ga + trace), over K.
    """
    h = inputs.num_heads
    q, k, v = (split_heads(p.mean, h) for p in (inputs.query, inputs.key, inputs.value))
    query_cov, key_cov, value_cov = (
        _head_blocks(p.cov, h) for p in (inputs.query, inputs.key, inputs.value)
    )
    width = q.shape[2]
    # Noise of single keys: sum_dd' E[q_had q_gad'] Cov[k_hcd, k_gcd'], (H, H, T, S).
    query_moment = query_cov + jnp.einsum("had,gae->ahdge", q, q)
    own = _per_pair(product_with_transposed)(_pairs(query_moment), _pairs(key_cov)) / width
    scores = jnp.einsum("had,hcd->hac", q, k)
    query_kernel = inputs.shared.query_kernel
    if inputs.order == 2 and query_kernel is not None:
        scores = scores + _shared_scores(inputs.shared, query_kernel, h, k.shape[1])
    scores = scores / jnp.sqrt(jnp.asarray(width, scores.dtype))
    if inputs.order == 1:
        weights = masked_softmax(scores, inputs.mask)
    else:
        own_query = jnp.einsum("ahdhe->hade", query_cov) / width
        rows = _Rows(jnp.einsum("hhac->hac", own), own_query, k)
        weights = expected_softmax(scores, rows, inputs.mask)
    mean = jnp.einsum("hac,hcd->had", weights, v)
    blocks = _output_blocks(weights, mean, k, v, query_cov, value_cov, own, inputs.order)
    t = mean.shape[1]
    cov = TokenBlock(blocks.reshape(t, h * width, h * width))
    return merge_heads(mean), cov, Mixing(weights)


class _Rows(NamedTuple):
    """Covariance of every row of scores: keys' noise on the diagonal, and queries' noise k Q k^T."""

    own: Array  # (H, T, S)
    query: Array  # Q, (H, T, K, K)
    key: Array  # k, (H, S, K)

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
    """(T, H, K, H, K) -> what each pair of heads has, (H, H, T, K^2)."""
    return _flat(blocks.transpose(1, 3, 0, 2, 4))


def _unpaired(pairs: Array, width: int) -> Array:
    """The way back, (H, H, T, K^2) -> (T, H, K, H, K)."""
    return pairs.reshape(*pairs.shape[:3], width, width).transpose(2, 0, 3, 1, 4)


def _per_pair(product: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """A product for each pair of heads."""
    return jax.vmap(jax.vmap(product))


def _shared_scores(
    shared: SharedInput[TokenBlock], query_kernel: Array, num_heads: int, num_keys: int
) -> Array:
    """sum_d Cov[q_had, k_had]: with independent tokens, only of a token with itself, (H, T, S)."""
    query, key = (split_heads(m, num_heads) for m in (query_kernel, shared.key_kernel))
    metric = jnp.einsum("hik,hjk->hij", query, key)
    blocks = own_tokens(shared.cov.blocks, shared.places)
    own = jnp.einsum("tij,hij->ht", blocks, metric)
    return jax.vmap(lambda row: at_own(row, shared.places, num_keys))(own)


def _output_blocks(
    weights: Array,
    mean: Array,
    k: Array,
    v: Array,
    query_cov: Array,
    value_cov: Array,
    own: Array,
    order: int,
) -> Array:
    """Cov[A_had, A_gae], (T, H, K, H, K): of queries, of keys, of values, and of keys with values."""
    width = k.shape[2]
    # The derivative of A_had with respect to the scores, (H, T, S, K). Multiplied out, its products
    # would lose what noise of large scores gives a row that has all its weight on one key.
    change = weights[..., None] * (v[:, None] - mean[:, :, None])
    slope = jnp.einsum("hacd,hce->hade", change, k)
    by_query = jnp.einsum("hadp,ahpgq,gaeq->ahdge", slope, query_cov, slope) / width
    # sum_c W_hac W_gac Cov[v_hc, v_gc], as products of what each pair of heads has
    value_pairs = _pairs(value_cov)
    both = jnp.einsum("hac,gac->hgac", weights, weights)
    by_value = _unpaired(_per_pair(rows_product)(both, value_pairs), width)
    # sum_c W_hac W_gac own_hgac E[(v_hc - A_ha) (v_gc - A_ga)^T]; A is as random as the values that it
    # averages, of which v_hc is one.
    pair = both * own
    others = pair @ (1 - jnp.eye(k.shape[1], dtype=pair.dtype))  # a difference could be negative
    random = pair * (1 - weights[:, None]) * (1 - weights[None]) + both * others
    by_key = jnp.einsum("hgac,hacd,gace->ahdge", own, change, change)
    by_key = by_key + _unpaired(_per_pair(rows_product)(random, value_pairs), width)
    by_scores = by_query + by_key
    if order == 2:
        second = jnp.sum(v**2, axis=2) + jnp.einsum("chdhd->hc", value_cov)
        averaged = jnp.sum(mean**2, axis=2) + jnp.einsum("ahdhd->ha", by_value)
        within = left_within(jnp.einsum("hac,hc->ha", weights, second), averaged)
        gain = saturation(jnp.einsum("ahdhd->ha", by_scores), within).T
        by_scores = gain[:, :, None, None, None] * by_scores * gain[:, None, None, :, None]
    return by_scores + by_value
