"""One head of `Separable`'s attention, in token and feature Gram matrices.

Queries, keys and values are read as Cov[x_ti, x_sj] = G_ts F_ij / tr F, with their token and feature
Gram matrices G and F. The covariance Cov[S_ac, S_bf] of the scores S = q k^T / sqrt(K) is

    alpha_ab Kc_cf + beta_ab KK_cf,    alpha = (q Fk q^T + <Fq, Fk> Qc) / K,    beta = Qc / K,

made one Kronecker product, with the token Gram matrices Qc and Kc of queries and keys, their feature
Gram matrices Fq and Fk over their traces, and KK = k Fq k^T. Softmax sees contrasts of keys alone, so Fk
is that of the keys less their average. The T^4 covariance is never formed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_divide
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.layers.attention.rows import (
    Products,
    RowCovariance,
    Term,
    inner_noise,
    score_noise,
)
from moment_jax.layers.attention.shared_input import Centres, Links, score_value, shared_mean
from moment_jax.xla import (
    diagonal_of,
    materialized,
    product_with_transposed,
    rows_diagonal,
    rows_product,
)

Array = jax.Array


class Head(NamedTuple):
    """One head."""

    query: Array  # mean, (T, K)
    key: Array  # (S, K)
    value: Array  # (S, K)
    query_features: Array  # feature Gram matrix, (K, K)
    contrasts: Array  # that of the keys less their average, (K, K)
    value_features: Array  # (K, K)
    metric: Array  # under which the token Gram matrix is wanted, (K, K)
    kernel: Array  # of the output, (K, D)


class Tokens(NamedTuple):
    """What all heads have in common: token Gram matrices over their traces, (T, T) each."""

    query: Array
    key: Array
    value: Array
    centre: Array  # what takes the average off: a (S, S) quadratic form in keys
    pool: Array | None  # weights of the queries in sums over them, (T,)


class Mixed(NamedTuple):
    """One head's output."""

    mean: Array  # (T, K)
    weights: Array  # (T, S)
    reach: Array  # weights times the values' token pattern, (T, S)
    gain: Array  # of the softmax, (T,)
    token_gram: Array  # all but the averages of random values, under the metric, (T, T)
    feature_gram: Array  # all but the averages of random values, (K, K)
    energy: Array  # variance by the scores, summed over the features, (T,)
    variance: Array  # variance of the projected output by the scores, (T, D)


def mix_head(head: Head, tokens: Tokens, links: Links, mask: Array | None, order: int) -> Mixed:
    """Mix the tokens of one head.

    Args:
      head: the head's moments, and the part of the output kernel that it meets.
      tokens: what all heads have in common.
      links: what keys and values share, and queries with them.
      mask: (T, S) boolean, True where a query may look; None for all.
      order: 1 (Taylor at the mean) or 2.
    """
    width = jnp.asarray(head.query.shape[1], head.query.dtype)
    scores = head.query @ head.key.T
    if order == 2 and links.query_key is not None:
        scores = scores + links.tokens * jnp.sum(diagonal_of(links.query_key))
    scores = materialized(scores / jnp.sqrt(width))
    rows = _rows(head, tokens, width)
    seen = rows.contrasts()
    weights = masked_softmax(scores, mask) if order == 1 else expected_softmax(scores, seen, mask)
    weights = materialized(weights)
    mean, reach = weights @ head.value, rows_product(weights, tokens.value)

    products = _products(head, tokens, weights, mean, reach)
    noise = score_noise(seen, weights, products, order)
    token_gram = noise.token_gram
    inner = inner_noise(seen, weights, noise.gain, tokens.pool)
    feature_gram = head.value.T @ inner @ head.value
    feature_gram = feature_gram + jnp.sum(inner * tokens.value) * head.value_features
    noisy = weights**2 * rows.variance()
    independent = jnp.sum(noisy * products.spread(), axis=1)
    # Where a row has one key left, the sum is rounding of either sign.
    second = rows_diagonal(products.values)[None, :] + rows_diagonal(products.averages)[:, None]
    least = 2 * jnp.finfo(noisy.dtype).eps * jnp.sum(noisy * second, axis=1)
    independent = jnp.maximum(independent, least)
    size = safe_divide(jnp.maximum(rows_diagonal(token_gram), 0), independent)
    energy, variance = _by_independent_keys(head, tokens, noisy, weights, mean, reach)
    gain = noise.gain / jnp.sqrt(width)
    linked = rows_product(weights, links.tokens)
    centres = Centres(head.query, head.key, head.value)
    crossed_tokens, crossed_features = score_value(
        centres, links, weights, mean, gain, linked, head.metric, tokens.pool
    )
    token_gram = token_gram + crossed_tokens + crossed_tokens.T
    feature_gram = feature_gram + crossed_features + crossed_features.T
    if order == 2:
        mean = mean + shared_mean(centres, links, weights, gain, linked)
    return Mixed(
        mean,
        weights,
        reach,
        noise.gain,
        token_gram,
        feature_gram,
        size * energy,
        size[:, None] * variance,
    )


def _products(head: Head, tokens: Tokens, weights: Array, mean: Array, reach: Array) -> Products:
    """Inner products of the values and of their averages under the head's metric."""
    value, average = head.value @ head.metric, mean @ head.metric
    noise = jnp.sum(head.value_features * head.metric)
    return Products(
        head.value @ value.T + noise * tokens.value,
        mean @ value.T + noise * reach,
        mean @ average.T + noise * product_with_transposed(reach, weights),
    )


def _by_independent_keys(
    head: Head, tokens: Tokens, noisy: Array, weights: Array, mean: Array, reach: Array
) -> tuple[Array, Array]:
    """Variance by scores whose keys are independent: over the head's features, (T,), and (T, D).

    Args:
      head: one head.
      tokens: what the heads have in common.
      noisy: Var[S_ac] times the squared weights, (T, S).
      weights: W, (T, S).
      mean: W v, (T, K).
      reach: W times the token pattern of the values, (T, S).
    """
    overlap = jnp.sum(reach * weights, axis=1, keepdims=True)
    spread = rows_diagonal(tokens.value)[None, :] - 2 * reach + overlap
    by_noise = jnp.sum(noisy * spread, axis=1, keepdims=True)
    total = jnp.sum(noisy, axis=1, keepdims=True)

    def by_mean(value: Array, average: Array) -> Array:
        return noisy @ value**2 - 2 * average * (noisy @ value) + average**2 * total

    energy = jnp.sum(by_mean(head.value, mean), axis=1)
    energy = energy + by_noise[:, 0] * jnp.sum(diagonal_of(head.value_features))
    projected = jnp.sum((head.value_features @ head.kernel) * head.kernel, axis=0)
    variance = by_mean(head.value @ head.kernel, mean @ head.kernel)
    variance = variance + by_noise * projected[None, :]
    return jnp.maximum(energy, 0), jnp.maximum(variance, 0)


def _rows(head: Head, tokens: Tokens, width: Array) -> RowCovariance:
    """Covariance of the scores, one Kronecker product in the place of two.

    The keys' side is the average that the queries have over the tokens; the queries' side keeps, for
    every pair of tokens, the total variance of contrasts of keys.
    """
    key_mean = (head.key @ head.query_features) @ head.key.T
    by_key = jnp.sum(tokens.key * tokens.centre)
    by_mean = jnp.sum(key_mean * tokens.centre)
    both = jnp.sum(head.query_features * head.contrasts)
    near = (head.query @ head.contrasts) @ head.query.T + both * tokens.query
    share = safe_divide(_average(rows_diagonal(near), tokens.pool), by_key)
    keys = share * tokens.key + _average(rows_diagonal(tokens.query), tokens.pool) * key_mean
    total = jnp.broadcast_to(jnp.sum(keys * tokens.centre), (1, 1))
    queries = safe_divide(near + by_mean * tokens.query, total) / width
    return RowCovariance((Term(queries, keys),))


def _average(row: Array, pool: Array | None) -> Array:
    """The average over the queries, weighted where there are weights."""
    if pool is None:
        return jnp.mean(row)
    return safe_divide(jnp.sum(pool * row), jnp.sum(pool))
