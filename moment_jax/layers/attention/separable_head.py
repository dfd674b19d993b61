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
from moment_jax.layers.attention.head_noise import HeadNoise
from moment_jax.layers.attention.inputs import Centres, root_width
from moment_jax.layers.attention.mix import Output
from moment_jax.layers.attention.rows import (
    Products,
    RowCovariance,
    Term,
    score_noise,
    sum_noise,
)
from moment_jax.layers.attention.shared_input import Links, score_value, shared_mean
from moment_jax.xla import (
    diagonal_of,
    product_with_transposed,
    rows_diagonal,
    rows_product,
)

Array = jax.Array


class Head(NamedTuple):
    """One head."""

    centres: Centres
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


class HeadOutput(NamedTuple):
    """Noise of one head's output."""

    reach: Array  # weights times the values' common token pattern, (T, S)
    token_gram: Array  # all but what heads have in common, under the metric, (T, T)
    feature_gram: Array  # all but the averages of random values, (K, K)
    own_value: Array | None  # variance by this head's own values, under the metric, (T,)
    energy: Array  # variance by the scores, summed over the features, (T,)
    variance: Array  # variance of the projected output by the scores, (T, D)


class SeparableHead(NamedTuple):
    """One head, see `HeadMoments`."""

    moments: Head
    tokens: Tokens
    links: Links

    @property
    def centres(self) -> Centres:
        """Mean queries, keys and values."""
        return self.moments.centres

    def shared_scores(self) -> Array | None:
        """Through the input that queries and keys share."""
        if self.links.query_key is None:
            return None
        return self.links.tokens * jnp.sum(diagonal_of(self.links.query_key))

    def rows(self) -> RowCovariance:
        """By the noise of the keys, and by that of the queries.

        The keys' side is the average that the queries have over the tokens; the queries' side keeps,
        for every pair of tokens, the total variance of contrasts of keys. One product in the place of
        the two would save two products of T x T matrices, and lose a tenth of the sum's variance at 64
        tokens.
        """
        head, tokens, _ = self
        means, width = self.centres.query, self.centres.query.shape[1]
        used = weighted(jnp.ones_like(means[:, 0]), tokens.score_pool)
        total = jnp.broadcast_to(jnp.sum(used), (1, 1))
        by_query = safe_divide(head.query_features, total)  # of an average token
        query = weighted(means, tokens.score_pool).T @ means
        moment = safe_divide(query, total) + by_query  # E[q q^T]
        spread = head.key_spread.T @ head.key_spread

        def term(near: Array, keys: Array, size: Array) -> Term:
            return Term.of(safe_divide(near, jnp.broadcast_to(size, (1, 1))) / width, keys)

        by_keys = head.query_noise.gram(head.contrasts, tokens.queries, tokens.query)
        by_keys = by_keys + (means @ head.contrasts) @ means.T
        by_queries = head.query_noise.gram(spread, tokens.queries, tokens.query)
        keys = head.key_noise.gram(moment, tokens.source, tokens.key)
        sizes = jnp.sum(head.contrasts * moment), jnp.sum(spread * by_query)
        terms = (
            term(by_keys, keys, sizes[0]),
            term(by_queries, (self.centres.key @ by_query) @ self.centres.key.T, sizes[1]),
        )
        return RowCovariance.merged(terms, sizes)

    def output(self, rows: RowCovariance, weights: Array, mean: Array, order: int) -> Output:
        """Gram matrices and variances of the head's part of the projected output."""
        head, tokens, links = self
        reach = rows_product(weights, tokens.value)
        of_noise, own_value = self._noise_products(weights, reach)
        products = _products(head, mean, of_noise)
        noise = score_noise(rows, weights, products, order)
        size = jnp.broadcast_to(jnp.sum(head.value_features * head.metric), (1, 1))
        pattern = Products(*(safe_divide(part, size) for part in of_noise))
        summed = sum_noise(
            rows, weights, noise.gain, self.centres.value, mean, pattern, tokens.pool
        )
        noisy = weights**2 * rows.variance()
        size = _over_independent(rows_diagonal(noise.token_gram), noisy, products)
        energy, variance = _by_independent_keys(
            head, pattern.values, noisy, weights, mean, pattern.crossed
        )
        gain = noise.gain / root_width(mean)
        linked = reach
        if links.tokens is not tokens.value:
            linked = rows_product(weights, links.tokens)
        crossed_tokens, crossed_features = score_value(
            self.centres, links, weights, mean, gain, linked, head.metric, tokens.pool
        )
        feature_gram = summed.features + summed.pattern * head.value_features
        result = HeadOutput(
            reach,
            noise.token_gram + of_noise.averages + crossed_tokens + crossed_tokens.T,
            feature_gram + crossed_features + crossed_features.T,
            own_value,
            size * energy,
            size[:, None] * variance,
        )
        return Output(result, noise.gain, shared_mean(self.centres, links, weights, gain, linked))

    def _noise_products(self, weights: Array, reach: Array) -> tuple[Products, Array | None]:
        """Products of the values' noise under the metric; and the variance by the head's own, (T,)."""
        head, tokens, _ = self
        shared = jnp.sum(head.value_noise.features * head.metric)
        noise, crossed, own_value = shared * tokens.value, shared * reach, None
        if head.value_noise.own is not None:
            own = head.value_noise.own_gram(head.metric, tokens.source, tokens.value)
            own_reach = rows_product(weights, own)
            noise, crossed = noise + own, crossed + own_reach
            own_value = jnp.sum(own_reach * weights, axis=1)
        return Products(noise, crossed, product_with_transposed(crossed, weights)), own_value


def _over_independent(total: Array, noisy: Array, products: Products) -> Array:
    """The variance by the scores (T,), over what it would be with independent keys."""
    independent = jnp.sum(noisy * products.spread(), axis=1)
    # Where a row has one key left, the sum is rounding of either sign.
    second = rows_diagonal(products.values)[None, :] + rows_diagonal(products.averages)[:, None]
    least = 2 * jnp.finfo(noisy.dtype).eps * jnp.sum(noisy * second, axis=1)
    return safe_divide(jnp.maximum(total, 0), jnp.maximum(independent, least))


def _products(head: Head, mean: Array, noise: Products) -> Products:
    """Inner products of the values and of their averages under the head's metric, with their noise."""
    value, average = head.centres.value @ head.metric, mean @ head.metric
    return Products(
        head.centres.value @ value.T + noise.values,
        mean @ value.T + noise.crossed,
        mean @ average.T + noise.averages,
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

    noisy_value = noisy @ head.centres.value

    def by_mean(value: Array, average: Array, noisy_value: Array) -> Array:
        return noisy @ value**2 - 2 * average * noisy_value + average**2 * total

    energy = jnp.sum(by_mean(head.centres.value, mean, noisy_value), axis=1)
    energy = energy + by_noise[:, 0] * jnp.sum(diagonal_of(head.value_features))
    projected = jnp.sum((head.value_features @ head.kernel) * head.kernel, axis=0)
    variance = by_mean(*(rows @ head.kernel for rows in (head.centres.value, mean, noisy_value)))
    variance = variance + by_noise * projected[None, :]
    return jnp.maximum(energy, 0), jnp.maximum(variance, 0)
