"""One head of `Separable`'s attention, in token and feature Gram matrices.

Queries, keys and values are read as Cov[x_ti, x_sj] = G_ts F_ij / tr F, with their token and feature
Gram matrices G and F. The covariance Cov[S_ac, S_bf] of the scores S = q k^T / sqrt(K) is

    alpha_ab Kc_cf + beta_ab KK_cf,    alpha = (q Fk q^T + <Fq, Fk> Qc) / K,    beta = Qc / K,

with the token Gram matrices Qc and Kc of queries and keys, their feature Gram matrices Fq and Fk over
their traces, and KK = k Fq k^T. Softmax sees contrasts of keys alone, so Fk is that of the keys less
their average. The T^4 covariance is never formed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_divide, weighted
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.layers.attention.head_noise import HeadNoise
from moment_jax.layers.attention.rows import (
    Products,
    RowCovariance,
    Term,
    score_noise,
    sum_noise,
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
    query_noise: HeadNoise
    key_noise: HeadNoise
    value_noise: HeadNoise
    query_features: Array  # sum_t Cov[q_td, q_te], (K, K)
    contrasts: Array  # that of the keys less their average, (K, K)
    key_spread: Array  # mean keys less their average, (S, K)
    value_features: Array  # of the sum of the values, (K, K)
    metric: Array  # under which the token Gram matrix is wanted, (K, K)
    kernel: Array  # of the output, (K, D)


class Tokens(NamedTuple):
    """What all heads have in common."""

    queries: Array  # mean of the sequence that queries are made of, (T, D)
    source: Array  # mean of the sequence that is looked at, (S, D)
    query: Array  # token pattern of the queries' noise, (T, T)
    key: Array  # of the keys', (S, S)
    value: Array  # of the values', (S, S)
    pool: Array | None  # weights of the queries in sums over them, (T,)
    score_pool: Array | None  # in averages that serve the scores alone, (T,)


class Mixed(NamedTuple):
    """One head's output."""

    mean: Array  # (T, K)
    weights: Array  # (T, S)
    reach: Array  # weights times the values' common token pattern, (T, S)
    gain: Array  # of the softmax, (T,)
    token_gram: Array  # all but what heads have in common, under the metric, (T, T)
    feature_gram: Array  # all but the averages of random values, (K, K)
    own_value: Array | None  # variance by this head's own values, under the metric, (T,)
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
    if order == 1:
        weights = masked_softmax(scores, mask)
    else:
        weights = expected_softmax(scores, seen.merged(), mask)
    weights = materialized(weights)
    mean, reach = weights @ head.value, rows_product(weights, tokens.value)
    shared = jnp.sum(head.value_noise.features * head.metric)
    noise_tokens, noise_reach, own_value = shared * tokens.value, shared * reach, None
    if head.value_noise.own is not None:
        own = head.value_noise.own_gram(head.metric, tokens.source, tokens.value)
        own_reach = rows_product(weights, own)
        noise_tokens, noise_reach = noise_tokens + own, noise_reach + own_reach
        own_value = jnp.sum(own_reach * weights, axis=1)

    averages = product_with_transposed(noise_reach, weights)
    products = _products(head, mean, noise_tokens, noise_reach, averages)
    noise = score_noise(seen, weights, products, order)
    token_gram = noise.token_gram + averages
    size = jnp.broadcast_to(jnp.sum(head.value_features * head.metric), (1, 1))
    of_noise = Products(noise_tokens, noise_reach, averages)
    pattern = Products(*(safe_divide(part, size) for part in of_noise))
    summed = sum_noise(seen, weights, noise.gain, head.value, mean, pattern, tokens.pool)
    feature_gram = summed.features + summed.pattern * head.value_features
    noisy = weights**2 * rows.variance()
    independent = jnp.sum(noisy * products.spread(), axis=1)
    # Where a row has one key left, the sum is rounding of either sign.
    second = rows_diagonal(products.values)[None, :] + rows_diagonal(products.averages)[:, None]
    least = 2 * jnp.finfo(noisy.dtype).eps * jnp.sum(noisy * second, axis=1)
    independent = jnp.maximum(independent, least)
    size = safe_divide(jnp.maximum(rows_diagonal(noise.token_gram), 0), independent)
    energy, variance = _by_independent_keys(
        head, pattern.values, noisy, weights, mean, pattern.crossed
    )
    gain = noise.gain / jnp.sqrt(width)
    linked = reach
    if links.tokens is not tokens.value:
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
        own_value,
        size * energy,
        size[:, None] * variance,
    )


def _products(head: Head, mean: Array, values: Array, crossed: Array, averages: Array) -> Products:
    """Inner products of the values and of their averages under the head's metric, and their noise."""
    value, average = head.value @ head.metric, mean @ head.metric
    return Products(
        head.value @ value.T + values, mean @ value.T + crossed, mean @ average.T + averages
    )


def _by_independent_keys(
    head: Head, pattern: Array, noisy: Array, weights: Array, mean: Array, reach: Array
) -> tuple[Array, Array]:
    """Variance by scores whose keys are independent: over the head's features, (T,), and (T, D).

    Args:
      head: one head.
      pattern: of the tokens in the noise of the values, (S, S).
      noisy: Var[S_ac] times the squared weights, (T, S).
      weights: W, (T, S).
      mean: W v, (T, K).
      reach: W times that pattern, (T, S).
    """
    overlap = jnp.sum(reach * weights, axis=1, keepdims=True)
    spread = rows_diagonal(pattern)[None, :] - 2 * reach + overlap
    by_noise = jnp.sum(noisy * spread, axis=1, keepdims=True)
    total = jnp.sum(noisy, axis=1, keepdims=True)

    noisy_value = noisy @ head.value

    def by_mean(value: Array, average: Array, noisy_value: Array) -> Array:
        return noisy @ value**2 - 2 * average * noisy_value + average**2 * total

    energy = jnp.sum(by_mean(head.value, mean, noisy_value), axis=1)
    energy = energy + by_noise[:, 0] * jnp.sum(diagonal_of(head.value_features))
    projected = jnp.sum((head.value_features @ head.kernel) * head.kernel, axis=0)
    variance = by_mean(*(rows @ head.kernel for rows in (head.value, mean, noisy_value)))
    variance = variance + by_noise * projected[None, :]
    return jnp.maximum(energy, 0), jnp.maximum(variance, 0)


def _rows(head: Head, tokens: Tokens, width: Array) -> RowCovariance:
    """Covariance of the scores: by the noise of the keys, and by that of the queries.

    The keys' side is the average that the queries have over the tokens; the queries' side keeps, for
    every pair of tokens, the total variance of contrasts of keys. One product in the place of the two
    would save two products of T x T matrices, and lose a tenth of the sum's variance at 64 tokens.
    """
    used = weighted(jnp.ones_like(head.query[:, 0]), tokens.score_pool)
    total = jnp.sum(used)
    by_query = safe_divide(
        head.query_features, jnp.broadcast_to(total, (1, 1))
    )  # of an average token
    query = weighted(head.query, tokens.score_pool).T @ head.query
    moment = safe_divide(query, jnp.broadcast_to(total, (1, 1))) + by_query  # E[q q^T]
    spread = head.key_spread.T @ head.key_spread

    def term(near: Array, keys: Array, size: Array) -> Term:
        return Term(safe_divide(near, jnp.broadcast_to(size, (1, 1))) / width, keys, size)

    by_keys = head.query_noise.gram(head.contrasts, tokens.queries, tokens.query)
    by_keys = by_keys + (head.query @ head.contrasts) @ head.query.T
    by_queries = head.query_noise.gram(spread, tokens.queries, tokens.query)
    return RowCovariance(
        (
            term(
                by_keys,
                head.key_noise.gram(moment, tokens.source, tokens.key),
                jnp.sum(head.contrasts * moment),
            ),
            term(by_queries, (head.key @ by_query) @ head.key.T, jnp.sum(spread * by_query)),
        )
    )
