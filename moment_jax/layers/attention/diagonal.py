"""Attention for `Diagonal`: one head at a time, every query, key and value entry independent.

The scores S_ac = q_a . k_c / sqrt(K) of one row share the query, so that

    Cov[S_ac, S_af] = own_ac [c = f] + sum_d Var[q_ad] k_cd k_fd / K

with own_ac = sum_d (q_ad^2 + Var[q_ad]) Var[k_cd] / K; rows are independent of each other. In the second
term all entries of a query are taken as equally noisy, so that it has one matrix k k^T for all rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance import Diagonal
from moment_jax.covariance.numerics import safe_divide
from moment_jax.expectations import masked_softmax
from moment_jax.expectations.softmax_mean import quick_expected_softmax
from moment_jax.layers.attention.each_head import each_head
from moment_jax.layers.attention.inputs import (
    Inputs,
    Mixing,
    Projection,
    SharedInput,
    merge_heads,
    split_heads,
)
from moment_jax.layers.attention.places import at_own, own_entries, own_tokens
from moment_jax.layers.attention.rows import left_within, saturation
from moment_jax.xla import diagonal_matrix, materialized, rows_product

Array = jax.Array


class _Part(NamedTuple):
    """One head's queries, keys or values."""

    mean: Array  # (T, K)
    variance: Array  # (T, K)


class _Shared(NamedTuple):
    """The input's variance, and one head's kernels."""

    variance: Array  # (T, D)
    query_kernel: Array | None  # (D, K); None where queries are made of another sequence
    key_kernel: Array  # (D, K)
    value_kernel: Array  # (D, K)
    places: Array | None  # of the queries' own tokens among the keys


class _Rows(NamedTuple):
    """Cov[S_ac, S_af] = own_ac [c = f] + query_a (k k^T)_cf."""

    own: Array  # (T, S)
    query: Array  # variance of an entry of each query, over K, (T, 1)
    key: Array  # k, (S, K)

    def variance(self) -> Array:
        """Var[S_ac], (T, S)."""
        return self.own + self._by_query()

    def matvec(self, weights: Array) -> Array:
        """sum_f Cov[S_ac, S_af] weights_af, (T, S)."""
        return self.own * weights + self.query * ((weights @ self.key) @ self.key.T)

    def _by_query(self) -> Array:
        return self.query * jnp.sum(self.key**2, axis=1)[None, :]


def mix_diagonal(inputs: Inputs[Diagonal]) -> tuple[Array, Diagonal, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), variance, and weights (H, T, S)."""
    h, shared = inputs.num_heads, _shared(inputs.shared, inputs.num_heads)
    parts = tuple(_part(p, h) for p in (inputs.query, inputs.key, inputs.value))

    def mix(one: Any) -> tuple[Array, Array, Array]:
        (q, k, v), kernels, mask = one
        return _head(
            q, k, v, _Shared._make((shared.variance, *kernels, shared.places)), mask, inputs.order
        )

    num_scores = h * parts[0].mean.shape[1] * parts[1].mean.shape[1]
    mean, variance, weights = each_head(mix, (parts, shared[1:4], inputs.mask), num_scores)
    return merge_heads(mean), Diagonal(merge_heads(variance)), Mixing(weights)


def _part(projection: Projection[Diagonal], num_heads: int) -> _Part:
    return _Part(
        split_heads(projection.mean, num_heads), split_heads(projection.cov.variances, num_heads)
    )


def _shared(shared: SharedInput[Diagonal], num_heads: int) -> _Shared:
    query = shared.query_kernel
    return _Shared(
        shared.cov.variances,
        None if query is None else split_heads(query, num_heads),
        split_heads(shared.key_kernel, num_heads),
        split_heads(shared.value_kernel, num_heads),
        shared.places,
    )


def _head(
    q: _Part, k: _Part, v: _Part, shared: _Shared, mask: Array | None, order: int
) -> tuple[Array, Array, Array]:
    """Mean (T, K), variance (T, K) and weights (T, S) of one head."""
    width = jnp.asarray(q.mean.shape[1], q.mean.dtype)
    scores = q.mean @ k.mean.T
    if order == 2 and shared.query_kernel is not None:
        metric = jnp.sum(shared.query_kernel * shared.key_kernel, axis=1)
        own_noise = own_tokens(shared.variance, shared.places) @ metric
        scores = scores + at_own(own_noise, shared.places, k.mean.shape[0])
    scores = materialized(scores / jnp.sqrt(width))
    own = (q.mean**2 + q.variance) @ k.variance.T / width
    rows = _Rows(own, jnp.mean(q.variance, axis=1, keepdims=True) / width, k.mean)
    expected = masked_softmax if order == 1 else partial(quick_expected_softmax, cov=rows)
    weights = materialized(expected(scores, mask=mask))
    mean = weights @ v.mean
    variance, gain = _variance(v, rows, weights, mean, order)
    if order == 2:
        mean = mean + gain[:, None] * _shared_mean(q, k, shared, weights)
    return mean, variance, weights


def _variance(
    v: _Part, rows: _Rows, weights: Array, mean: Array, order: int
) -> tuple[Array, Array]:
    """Variance of weights @ values, (T, K), and the softmax's gain, (T,).

    The sum over the features of what the queries' noise gives is taken whole, and shared out as that
    of independent keys is: by itself it would take T^2 K^2 products.
    """
    width, noise = v.mean.shape[1], jnp.sum(v.variance, axis=1)
    values = jnp.sum(v.mean**2, axis=1) + noise  # E |v_c|^2
    key_size = jnp.sum(rows.key**2, axis=1, keepdims=True)
    squared, pulled = weights**2, weights * ((weights @ rows.key) @ rows.key.T)
    # Sums over the keys, with weights W^2 own, W^2 and W (W k) k^T.
    ones = jnp.ones_like(key_size)
    moments = jnp.concatenate([v.mean**2 + v.variance, v.mean, ones], axis=1)
    own = (squared * rows.own) @ jnp.concatenate([moments, values[:, None]], axis=1)
    common = squared @ jnp.concatenate([key_size * moments, v.variance], axis=1)
    by_pulled = pulled @ moments[:, width:]
    by_values = common[:, -width:]
    size = jnp.sum(mean**2, axis=1) + jnp.sum(by_values, axis=1)  # E |A_a|^2 of the averages A
    noisy = own[:, :-1] + rows.query * common[:, :-width]
    pattern = noisy[:, :width] - 2 * mean * noisy[:, width:-1] + mean**2 * noisy[:, -1:]
    pattern = jnp.maximum(pattern, 0)

    def crossed(values: Array, weighing: Array) -> Array:
        """Sums of E <A_a, v_c> over the keys: of v_c, and of W_ac times its noise."""
        return jnp.sum(mean * values, axis=1) + (weighing * weights) @ noise

    by_keys = own[:, -1] - 2 * crossed(own[:, width:-2], squared * rows.own) + size * own[:, -2]
    by_query = (
        _squared_products(rows.key, v.mean, noise, weights)
        - 2 * crossed(by_pulled[:, :-1], pulled)
        + size * by_pulled[:, -1]
    )
    total = jnp.maximum(by_keys + rows.query[:, 0] * jnp.maximum(by_query, 0), 0)
    gain = jnp.ones_like(total)
    if order == 2:
        within = left_within(weights @ values, size)
        gain = saturation(total, within)
        # Where a row gives all its weight to one key, the total is only rounding error. XLA may compute
        # it twice, and round it differently: then the gain does not bound it.
        total = jnp.minimum(gain**2 * total, within)
    share = safe_divide(pattern, jnp.sum(pattern, axis=1, keepdims=True))
    return by_values + share * total[:, None], gain


def _squared_products(k: Array, v: Array, noise: Array, weights: Array) -> Array:
    """sum_cf W_ac W_af (k_c . k_f) (v_c . v_f + [c = f] noise_c), (T,)."""
    if by_features(weights.shape[0], *k.shape):
        pairs = _mixed_pairs(weights, k, v)
        own = weights**2 @ (jnp.sum(k**2, axis=1) * noise)
        return jnp.sum(pairs**2, axis=(1, 2)) + own
    products = (k @ k.T) * (v @ v.T + diagonal_matrix(noise))
    return jnp.sum(weights * rows_product(weights, products), axis=1)


def _mixed_pairs(weights: Array, left: Array, right: Array) -> Array:
    """sum_c W_ac left_cd right_ce, (T, K, K)."""
    pairs = left[:, :, None] * right[:, None, :]
    return rows_product(weights, pairs.reshape(pairs.shape[0], -1)).reshape(-1, *pairs.shape[1:])


def by_features(num_queries: int, num_keys: int, width: int) -> bool:
    """Whether K^2 numbers for each query cost less than S^2 for all: so with a few queries."""
    return num_queries * width**2 < (num_queries + 2 * width) * num_keys


def _shared_mean(q: _Part, k: _Part, shared: _Shared, weights: Array) -> Array:
    """sum_c Cov[W_ac, v_cd]: weights and values share the random input, (T, K).

    By Stein's lemma Cov[W_ac, v_cd] = sum_f W_ac (1[c=f] - W_af) Cov[S_af, v_cd]; the key k_c shares its
    token with v_c, the query q_a with v_a.
    """
    width = jnp.asarray(q.mean.shape[1], q.mean.dtype)
    by_key = (q.mean @ shared.key_kernel.T) * ((weights - weights**2) @ shared.variance)
    if shared.query_kernel is None:
        return by_key @ shared.value_kernel / jnp.sqrt(width)
    offset = own_tokens(k.mean, shared.places) - weights @ k.mean
    by_query = (offset @ shared.query_kernel.T) * (
        own_entries(weights, shared.places)[:, None] * own_tokens(shared.variance, shared.places)
    )
    return (by_key + by_query) @ shared.value_kernel / jnp.sqrt(width)
