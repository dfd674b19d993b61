"""Attention for `TokenCorrelated`: one head at a time, in T x T Gram matrices.

Per head, Cov[S_ac, S_bf] of the scores S = q k^T / sqrt(K) is projected onto

    alpha_ab Kc_cf + beta_ab KK_cf,    alpha = (Qc + QQ) / K^2,    beta = Qc / K^2,

with the Gram matrices Qc = sum_d Cov[q_ad, q_bd], QQ = q q^T and likewise for keys and values: the sum
over features of products is replaced by the product of sums. The T^4 covariance is never formed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance import TokenCorrelated
from moment_jax.covariance.numerics import safe_divide
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.layers.attention.each_head import each_head
from moment_jax.layers.attention.inputs import (
    Inputs,
    Mixing,
    Projection,
    SharedInput,
    merge_heads,
    split_heads,
)
from moment_jax.layers.attention.rows import (
    Products,
    RowCovariance,
    Term,
    independent_variance,
    score_noise,
)
from moment_jax.xla import (
    materialized,
    product_with_transposed,
    rows_diagonal,
    rows_product,
)

Array = jax.Array


class _Head(NamedTuple):
    """One head's part of a projection: mean and scale (T, K), token correlation (T, T)."""

    mean: Array
    scale: Array
    correlation: Array

    def variance(self) -> Array:
        return self.scale**2

    def token_gram(self) -> Array:
        return self.correlation * (self.scale @ self.scale.T)


class _SharedHead(NamedTuple):
    """The input's scale (T, D) and correlation (T, T), and one head's kernels (D, K)."""

    scale: Array
    correlation: Array
    query_kernel: Array | None  # None where queries are made of another sequence
    key_kernel: Array
    value_kernel: Array


def mix_token_correlated(inputs: Inputs[TokenCorrelated]) -> tuple[Array, TokenCorrelated, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), covariance, and weights (H, T, S)."""
    h, shared = inputs.num_heads, _shared_heads(inputs.shared, inputs.num_heads)
    parts = [_heads(p, h) for p in (inputs.query, inputs.key, inputs.value)]

    def mix(one: Any) -> tuple[Array, Array, Array, Array]:
        arrays, kernels, mask = one
        q, k, v = (
            _Head(mean, scale, part.correlation)
            for (mean, scale), part in zip(arrays, parts, strict=True)
        )
        own = _SharedHead._make((*shared[:2], *kernels))
        return _head(q, k, v, own, mask, inputs.order)

    num_scores = h * parts[0].mean.shape[1] * parts[1].mean.shape[1]
    arrays = [(part.mean, part.scale) for part in parts]
    mean, variance, gram, weights = each_head(mix, (arrays, shared[2:], inputs.mask), num_scores)
    cov = TokenCorrelated.from_moments(merge_heads(variance), jnp.sum(gram, axis=0))
    return merge_heads(mean), cov, Mixing(weights)


def _heads(projection: Projection[TokenCorrelated], num_heads: int) -> _Head:
    return _Head(
        split_heads(projection.mean, num_heads),
        split_heads(projection.cov.scale, num_heads),
        projection.cov.correlation,
    )


def _shared_heads(shared: SharedInput[TokenCorrelated], num_heads: int) -> _SharedHead:
    query = shared.query_kernel
    return _SharedHead(
        shared.cov.scale,
        shared.cov.correlation,
        None if query is None else split_heads(query, num_heads),
        split_heads(shared.key_kernel, num_heads),
        split_heads(shared.value_kernel, num_heads),
    )


def _head(
    q: _Head, k: _Head, v: _Head, shared: _SharedHead, mask: Array | None, order: int
) -> tuple[Array, Array, Array, Array]:
    """Mean (T, K), variance (T, K), token Gram matrix (T, T) and weights (T, S) of one head."""
    rows, scores = _scores(q, k, shared, order)
    seen = rows.contrasts()
    weights = masked_softmax(scores, mask) if order == 1 else expected_softmax(scores, seen, mask)
    weights = materialized(weights)
    mean = weights @ v.mean
    variance, gram, gain = _output_moments(v, rows, seen, weights, mean, order)
    if order == 2:
        mean = mean + gain[:, None] * _shared_mean(q, k, shared, weights)
    return mean, variance, gram, weights


def _scores(q: _Head, k: _Head, shared: _SharedHead, order: int) -> tuple[RowCovariance, Array]:
    """Covariance and mean (T, S) of the scores."""
    width = q.mean.shape[1]
    query_cov, query_mean = q.token_gram(), q.mean @ q.mean.T
    rows = RowCovariance(
        (
            Term((query_cov + query_mean) / width**2, k.token_gram()),
            Term(query_cov / width**2, k.mean @ k.mean.T),
        )
    )
    scores = q.mean @ k.mean.T
    if order == 2 and shared.query_kernel is not None:
        # E[q . k] = E[q] . E[k] + sum_d Cov[q_d, k_d], through the input that both share.
        metric = jnp.sum(shared.query_kernel * shared.key_kernel, axis=1)
        scores = scores + shared.correlation * ((shared.scale * metric[None]) @ shared.scale.T)
    return rows, materialized(scores / jnp.sqrt(jnp.asarray(width, scores.dtype)))


def _output_moments(
    v: _Head,
    rows: RowCovariance,
    seen: RowCovariance,
    weights: Array,
    mean: Array,
    order: int,
) -> tuple[Array, Array, Array]:
    """Variance (T, K) and token Gram matrix (T, T) of weights @ values, and the softmax's gain (T,)."""
    value_cov = v.token_gram()
    reach = rows_product(weights, value_cov)
    by_values = product_with_transposed(reach, weights)
    products = Products(
        v.mean @ v.mean.T + value_cov, mean @ v.mean.T + reach, mean @ mean.T + by_values
    )
    by_scores = score_noise(seen, weights, products, order)
    gram = by_values + by_scores.token_gram
    # The variance of a token, shared out over the features by the pattern of independent keys.
    independent = independent_variance(rows, weights, mean, v.mean, v.variance())
    total = jnp.maximum(rows_diagonal(gram), 0)[:, None]
    share = safe_divide(independent, jnp.sum(independent, axis=1, keepdims=True))
    return share * total, gram, by_scores.gain


def _shared_mean(q: _Head, k: _Head, shared: _SharedHead, weights: Array) -> Array:
    """sum_c Cov[W_ac, v_cd]: weights and values share the random input, (T, K).

    By Stein's lemma Cov[W_ac, v_cd] = sum_f W_ac (1[c=f] - W_af) Cov[S_af, v_cd], and Cov[S_af, v_cd] =
    (sum_i (q_a Mk^T)_i Cov[x_fi, x_ci] Mv_id + (k_f Mq^T)_i Cov[x_ai, x_ci] Mv_id) / sqrt(K).
    """
    scale = shared.scale
    by_query = q.mean @ shared.key_kernel.T  # q_a Mk^T, (T, D)
    near = weights @ scale**2
    # sum_cf W_ac W_af Cov[x_ci, x_fi], with the token pattern of the sum over the features.
    gram = shared.correlation * (scale @ scale.T)
    far = jnp.sum(weights * rows_product(weights, gram), axis=1, keepdims=True)
    far = safe_divide(far * near, jnp.sum(near, axis=1, keepdims=True))
    key_side = by_query * (near - far)
    width = jnp.asarray(q.mean.shape[1], q.mean.dtype)
    if shared.query_kernel is None:
        return key_side @ shared.value_kernel / jnp.sqrt(width)
    by_key = k.mean @ shared.query_kernel.T  # k_f Mq^T, (S, D)
    linked = weights * shared.correlation
    query_side = scale * (linked @ (scale * by_key) - (weights @ by_key) * (linked @ scale))
    return (key_side + query_side) @ shared.value_kernel / jnp.sqrt(width)
