"""Attention for `TokenCorrelated`: one head at a time, in T x T Gram matrices.

Per head, Cov[S_ac, S_bf] of the scores S = q k^T / sqrt(K) is projected onto

    alpha_ab Kc_cf + beta_ab KK_cf,    alpha = (Qc + QQ) / K^2,    beta = Qc / K^2,

with the Gram matrices Qc = sum_d Cov[q_ad, q_bd], QQ = q q^T and likewise for keys and values: the sum
over features of products becomes the product of sums. The T^4 covariance is never formed.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import TokenCorrelated
from moment_jax.covariance.numerics import fit_rows, gram, nonnegative
from moment_jax.layers.attention.inputs import (
    Centres,
    Inputs,
    Mixing,
    merge_heads,
    root_width,
    split_heads,
)
from moment_jax.layers.attention.mix import Output, each_head, mix
from moment_jax.layers.attention.rows import RowCovariance, Term
from moment_jax.layers.attention.score_noise import Products, score_noise
from moment_jax.xla import product_with_transposed, rows_diagonal, rows_product


class _Noise(NamedTuple):
    """One head's queries, keys or values: scale (T, K), and token correlation (T, T)."""

    scale: Array
    correlation: Array

    def token_gram(self) -> Array:
        return self.correlation * (self.scale @ self.scale.T)


class _Input(NamedTuple):
    """The input's scale (T, D) and correlation (T, T), and one head's kernels (D, K)."""

    scale: Array
    correlation: Array
    query_kernel: Array | None  # None if queries come from another sequence
    key_kernel: Array
    value_kernel: Array


class _Averages(NamedTuple):
    """Noise of one head's output."""

    variance: Array  # (T, K)
    token_gram: Array  # (T, T)


def mix_token_correlated(inputs: Inputs[TokenCorrelated]) -> tuple[Array, TokenCorrelated, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), covariance, and weights (H, T, S)."""
    h, shared = inputs.num_heads, inputs.shared
    noise = [p.cov for p in (inputs.query, inputs.key, inputs.value)]
    scales = [split_heads(cov.scale, h) for cov in noise]
    kernels = [
        None if kernel is None else split_heads(kernel, h)
        for kernel in (shared.query_kernel, shared.key_kernel, shared.value_kernel)
    ]

    def mix_one(one: Any) -> tuple[Array, _Averages, Mixing]:
        centres, scales, kernels, mask = one
        q, k, v = (_Noise(s, cov.correlation) for s, cov in zip(scales, noise, strict=True))
        source = _Input(shared.cov.scale, shared.cov.correlation, *kernels)
        return mix(_Head(centres, q, k, v, source), mask, inputs.order)

    heads = (inputs.centres(), scales, kernels, inputs.mask)
    mean, averages, mixing = each_head(mix_one, heads, inputs.num_scores())
    cov = TokenCorrelated.from_moments(
        merge_heads(averages.variance), jnp.sum(averages.token_gram, axis=0)
    )
    return merge_heads(mean), cov, mixing


class _Head(NamedTuple):
    """One head, see `HeadMoments`."""

    centres: Centres
    query: _Noise
    key: _Noise
    value: _Noise
    source: _Input

    def shared_scores(self) -> Array | None:
        """E[q . k] = E[q] . E[k] + sum_d Cov[q_d, k_d], through the shared input."""
        source = self.source
        if source.query_kernel is None:
            return None
        metric = jnp.sum(source.query_kernel * source.key_kernel, axis=1)
        return source.correlation * gram(source.scale, metric)

    def rows(self) -> RowCovariance:
        """Covariance of the scores, from noise in keys and in queries."""
        query, key, _ = self.centres
        size, query_cov = query.shape[1] ** 2, self.query.token_gram()
        terms = (
            Term.of((query_cov + gram(query)) / size, self.key.token_gram()),
            Term.of(query_cov / size, gram(key)),
        )
        return RowCovariance(terms, terms)

    def output(self, rows: RowCovariance, weights: Array, mean: Array, order: int) -> Output:
        """Gram matrix of the tokens, spread over the features as for independent keys."""
        value, value_cov = self.centres.value, self.value.token_gram()
        reach = rows_product(weights, value_cov)
        by_values = product_with_transposed(reach, weights)
        products = Products(
            gram(value) + value_cov,
            mean @ value.T + reach,
            gram(mean) + by_values,
        )
        terms = [term.seen(weights) for term in rows.terms]
        by_scores = score_noise(terms, weights, products, order)
        token_gram = by_values + by_scores.token_gram
        pattern = _independent_variance(rows, weights, mean, value, self.value.scale**2)
        variance = fit_rows(pattern, rows_diagonal(token_gram))
        shared = by_scores.gain[:, None] * self._shared_mean(weights)
        return Output(_Averages(variance, token_gram), shared=shared)

    def _shared_mean(self, weights: Array) -> Array:
        """sum_c Cov[W_ac, v_cd] through the Jacobian at the weights, (T, K).

        By Stein's lemma Cov[W_ac, v_cd] = sum_f W_ac (1[c=f] - W_af) Cov[S_af, v_cd], and
        Cov[S_af, v_cd] = (sum_i (q_a Mk^T)_i Cov[x_fi, x_ci] Mv_id + (k_f Mq^T)_i Cov[x_ai, x_ci] Mv_id)
        / sqrt(K).
        """
        query, key, _ = self.centres
        scale, correlation, query_kernel, key_kernel, value_kernel = self.source
        by_query = query @ key_kernel.T  # q_a Mk^T, (T, D)
        near = weights @ scale**2
        # sum_cf W_ac W_af Cov[x_ci, x_fi], with one token pattern for all features.
        token_gram = correlation * gram(scale)
        far = fit_rows(near, jnp.sum(weights * rows_product(weights, token_gram), axis=1))
        change = by_query * (near - far)
        if query_kernel is not None:
            by_key = key @ query_kernel.T  # k_f Mq^T, (S, D)
            linked = weights * correlation
            change = change + scale * (
                linked @ (scale * by_key) - (weights @ by_key) * (linked @ scale)
            )
        return change @ value_kernel / root_width(query)


def _independent_variance(
    rows: RowCovariance, weights: Array, mean: Array, values: Array, variance: Array
) -> Array:
    """Var[sum_c W_ac v_cd] for independent keys, (T, K): a pattern for the true variance.

    Takes the scores' covariance, E[W] (T, S), `mean` = weights @ values (T, K), E[v] and Var[v], both
    (S, K).
    """
    squared = weights**2
    noisy = squared * rows.variance()
    result = (
        squared @ variance
        + noisy @ (values**2 + variance)
        - 2 * mean * (noisy @ values)
        + mean**2 * jnp.sum(noisy, axis=1, keepdims=True)
    )
    return nonnegative(result)
