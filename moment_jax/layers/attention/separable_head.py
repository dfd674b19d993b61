"""One head of `Separable`'s attention, in token and feature Gram matrices.

Queries, keys and values are taken as Cov[x_ti, x_sj] = G_ts F_ij / tr F, with their token and feature
Gram matrices G and F. The covariance Cov[S_ac, S_bf] of the scores S = q k^T / sqrt(K) is

    alpha_ab Kc_cf + beta_ab KK_cf,    alpha = (q Fk q^T + <Fq, Fk> Qc) / K,    beta = Qc / K,

with the token Gram matrices Qc and Kc of queries and keys, their feature Gram matrices Fq and Fk over
their traces, and KK = k Fq k^T. Softmax sees only contrasts of keys, so Fk is that of the keys minus
their average. The T^4 covariance is never formed.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import gram, nonnegative, safe_divide, weighted
from moment_jax.layers.attention.head_noise import HeadNoise
from moment_jax.layers.attention.inputs import Centres, root_width
from moment_jax.layers.attention.mix import Output
from moment_jax.layers.attention.rows import RowCovariance, SeenTerm, Term
from moment_jax.layers.attention.score_noise import (
    Products,
    Sizes,
    Summed,
    SumNoise,
    bounded_sum,
    score_noise,
    sum_noise,
)
from moment_jax.layers.attention.shared_input import Links, shared_mean
from moment_jax.xla import diagonal_of, materialized


class Head(NamedTuple):
    """One head."""

    centres: Centres
    query_noise: HeadNoise
    key_noise: HeadNoise
    value_noise: HeadNoise
    query_features: Array  # sum_t Cov[q_td, q_te], (K, K)
    contrasts: Array  # the same for the keys minus their average, (K, K)
    key_spread: Array  # mean keys minus their average, (S, K)
    value_features: Array  # covariance of the sum of the values, (K, K)
    metric: Array  # for the output's token Gram matrix, (K, K)
    kernel: Array  # of the output, (K, D)

    def value_size(self) -> Array:
        """Size of the values' noise under the metric, (1, 1)."""
        return jnp.broadcast_to(jnp.sum(self.value_features * self.metric), (1, 1))


class Tokens(NamedTuple):
    """Data shared by all heads."""

    queries: Array  # mean of the sequence behind the queries, (T, D)
    source: Array  # mean of the sequence behind keys and values, (S, D)
    query: Array  # token pattern of the queries' noise, (T, T)
    key: Array  # of the keys', (S, S)
    value: Array  # of the values', (S, S)
    pool: Array | None  # weights of the queries in sums over them, (T,)
    score_pool: Array | None  # weights in averages used only for the scores, (T,)


class OverHeads(NamedTuple):
    """What heads add to the projected output; as part of a result, the sum over heads."""

    token_gram: Array  # without the noise that heads share, under the metric, (T, T)
    variance: Array  # from the scores, (T, D)


class HeadOutput(NamedTuple):
    """Noise of one head's output."""

    reach: Array  # weights times the values' token pattern, (T, S)
    feature_gram: Array  # without the averages of random values, (K, K)
    own_value: Array | None  # variance from this head's own values, under the metric, (T,)
    energy: Array  # variance from the scores, summed over features, (T,)
    summed: Any  # `OverHeads`


class Seen(NamedTuple):
    """A head's keys and values, weighted by attention."""

    terms: tuple[SeenTerm, ...]  # of the scores' covariance
    products: Products  # of the values
    noise: Products  # of the values' noise alone
    own_value: Array | None  # variance by this head's own values, under the metric, (T,)
    reach: Array  # W times the values' common token pattern, (T, S)
    linked: Array  # W times that of the input that keys and values share, (T, S)


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
        """sum_d Cov[q_ad, k_cd] through the shared input, (T, S)."""
        if self.links.query_key is None:
            return None
        return self.links.tokens * jnp.sum(diagonal_of(self.links.query_key))

    def rows(self) -> RowCovariance:
        """Covariance of the scores, as Kronecker products from noise in keys and in queries.

        The keys' side averages over the queries of all tokens; the queries' side keeps the total
        variance of contrasts of keys for every pair of tokens. Using one product instead of two would
        save two products of T x T matrices, and lose a tenth of the sum's variance at 64 tokens.
        """
        head, tokens, _ = self
        (means, key, _), width = self.centres, self.centres.query.shape[1]
        used = weighted(jnp.ones_like(means[:, 0]), tokens.score_pool)
        total = jnp.broadcast_to(jnp.sum(used), (1, 1))
        by_query = safe_divide(head.query_features, total)  # of an average token
        query = gram(means.T, tokens.score_pool)
        moment = safe_divide(query, total) + by_query  # E[q q^T]
        spread = gram(head.key_spread.T)

        def term(near: Array, keys: Array, size: Array) -> Term:
            return Term.of(safe_divide(near, jnp.broadcast_to(size, (1, 1))) / width, keys)

        by_keys = head.query_noise.gram(head.contrasts, tokens.queries, tokens.query)
        by_keys = by_keys + gram(means, head.contrasts)
        by_queries = head.query_noise.gram(spread, tokens.queries, tokens.query)
        keys = head.key_noise.gram(moment, tokens.source, tokens.key)
        sizes = jnp.sum(head.contrasts * moment), jnp.sum(spread * by_query)
        terms = (
            term(by_keys, keys, sizes[0]),
            term(by_queries, materialized(gram(key, by_query)), sizes[1]),
        )
        return RowCovariance.merged(terms, sizes)

    def output(self, rows: RowCovariance, weights: Array, mean: Array, order: int) -> Output:
        """Gram matrices and variances of the head's part of the projected output."""
        head, _, links = self
        seen = self.seen(rows, weights, mean)
        noise = score_noise(seen.terms, weights, seen.products, order)
        noisy = weights**2 * rows.variance()
        summed = self.sum_noise(seen, weights, mean, noise.gain)
        size = _over_independent(diagonal_of(noise.token_gram), noisy, seen.products.sizes())
        spread = safe_divide(seen.noise.sizes().spread(), head.value_size())
        energy, variance = _by_independent_keys(head, spread, noisy, mean)
        gain = noise.gain / root_width(mean)
        result = HeadOutput(
            seen.reach,
            summed.features + summed.pattern * head.value_features,
            seen.own_value,
            size * energy,
            OverHeads(noise.token_gram + seen.noise.averages, size[:, None] * variance),
        )
        shared = shared_mean(self.centres, links, weights, gain, seen.linked)
        return Output(result, noise.gain, shared)

    def seen(self, rows: RowCovariance, weights: Array, mean: Array) -> Seen:
        """Keys and values weighted by attention."""
        head, tokens, links = self
        value = self.centres.value
        reach = linked = materialized(weights @ tokens.value)
        if links.tokens is not tokens.value:
            linked = weights @ links.tokens
        noise, own_value = self._noise_products(weights, reach)
        products = Products(
            gram(value, head.metric) + noise.values,
            mean @ (value @ head.metric).T + noise.crossed,
            gram(mean, head.metric) + noise.averages,
        )
        terms = tuple(term.seen(weights) for term in rows.terms)
        return Seen(terms, products, noise, own_value, reach, linked)

    def sum_noise(self, seen: Seen, weights: Array, mean: Array, gain: Array) -> SumNoise:
        """The contribution of score noise to the sum over tokens."""
        head, pool = self.moments, self.tokens.pool
        values, size = self.centres.value, weighted(gain[:, None], pool)
        noise = Products(*(safe_divide(part, head.value_size()) for part in seen.noise))
        terms = (
            Summed(size * term.queries * size.T, term.contrasts, term.pulled, term.met)
            for term in seen.terms
        )
        summed = sum_noise(terms, weights, values, mean, noise, pool)
        return bounded_sum(summed, weights, values, mean, noise.sizes(), pool)

    def _noise_products(self, weights: Array, reach: Array) -> tuple[Products, Array | None]:
        """Products of the values' noise under the metric; and the variance from the head's own, (T,)."""
        head, tokens, _ = self
        shared = jnp.sum(head.value_noise.features * head.metric)
        noise, crossed, own_value = shared * tokens.value, shared * reach, None
        if head.value_noise.own is not None:
            own = head.value_noise.own_gram(head.metric, tokens.source, tokens.value)
            own_reach = materialized(weights @ own)
            noise, crossed = noise + own, crossed + own_reach
            own_value = jnp.sum(own_reach * weights, axis=1)
        return Products(noise, crossed, crossed @ weights.T), own_value


def _over_independent(total: Array, noisy: Array, sizes: Sizes) -> Array:
    """Variance from the scores (T,), over that with independent keys."""
    independent = jnp.sum(noisy * sizes.spread(), axis=1)
    # In a row with all its weight on one key, the sum is rounding of either sign.
    second = sizes.values[None, :] + sizes.averages[:, None]
    least = 2 * jnp.finfo(noisy.dtype).eps * jnp.sum(noisy * second, axis=1)
    return safe_divide(nonnegative(total), jnp.maximum(independent, least))


def _by_independent_keys(
    head: Head, spread: Array, noisy: Array, mean: Array
) -> tuple[Array, Array]:
    """Variance from scores with independent keys: summed over the head's features, (T,), and (T, D).

    `spread` is E |v_c - A_a|^2 from the noise of the values, over its size, (T, S); `noisy` is
    Var[S_ac] times the squared weights, (T, S); `mean` is W v, (T, K).
    """
    by_noise = jnp.sum(noisy * spread, axis=1, keepdims=True)
    total = jnp.sum(noisy, axis=1, keepdims=True)

    noisy_value = noisy @ head.centres.value

    def by_mean(value: Array, average: Array, noisy_value: Array) -> Array:
        return noisy @ value**2 - 2 * average * noisy_value + average**2 * total

    energy = jnp.sum(by_mean(head.centres.value, mean, noisy_value), axis=1)
    energy = energy + by_noise[:, 0] * jnp.sum(diagonal_of(head.value_features))
    projected = jnp.sum((head.value_features @ head.kernel) * head.kernel, axis=0)
    parts = (head.centres.value, mean, noisy_value)
    variance = by_mean(*materialized([rows @ head.kernel for rows in parts]))
    variance = variance + by_noise * projected[None, :]
    return nonnegative(energy), nonnegative(variance)
