"""One head of `Separable`'s attention over a long sequence, by landmarks.

`SeparableHead` multiplies token-by-token arrays, T S S operations each. Here a few queries are
landmarks. The same formulas between all queries and the landmarks take T S M, and regression gives the
Gram matrices between all queries. Gram matrices of keys and values have finite rank except for a shared
token pattern, so their products with the weights cost T S D.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import nonnegative, pooled, safe_divide, safe_sqrt, weighted
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.layers.attention.landmarks import Regression, Sketch, choose_landmarks
from moment_jax.layers.attention.score_noise import (
    Products,
    Sizes,
    Summed,
    SumNoise,
    bounded_sum,
    sum_noise,
)
from moment_jax.layers.attention.separable_head import KeyNoise, Seen, SeparableHead
from moment_jax.xla import on_diagonal, rows_diagonal


class LandmarkHead(SeparableHead):
    """`SeparableHead` by landmarks."""

    def rows(self) -> LandmarkRows:
        """Covariance of the scores, from noise in keys and in queries."""
        terms, sizes = self.score_terms()
        own = [size * rows_diagonal(term.queries) for size, term in zip(sizes, terms, strict=True)]
        merged = safe_divide(own[0] + own[1], jnp.broadcast_to(sizes[0] + sizes[1], own[0].shape))
        return LandmarkRows(terms, merged[:, None], self.tokens.landmarks, self.tokens.exists)

    def seen(self, rows: LandmarkRows, weights: Array, mean: Array) -> Seen:
        """Keys and values weighted by attention."""
        head, tokens, links = self
        # A shift common to all values only adds rounding.
        centre = pooled(mean, tokens.pool) / pooled(jnp.ones_like(mean), tokens.pool)
        value, average = self.centres.value - centre[None, :], mean - centre[None, :]
        under_value, under_average = value @ head.metric, average @ head.metric
        by_mean = Sizes(
            jnp.sum(under_value * value, axis=1),
            under_average @ value.T,
            jnp.sum(under_average * average, axis=1),
        )
        # Importance: the variance that independent keys would give.
        importance = jnp.sum(weights**2 * rows.variance() * by_mean.spread(), axis=1)
        size = safe_sqrt(importance)
        at = choose_landmarks(size, tokens.landmarks, tokens.exists)

        def reach(pattern: Array) -> Array:
            """Weights times a token pattern, by what the landmarks see of it."""
            sketch = Sketch.of(pattern, weights[at])
            return sketch.product(weights).at[at].set(sketch.columns.T)

        common = linked = by_keys = reach(tokens.value)
        if links.tokens is not tokens.value:
            linked = reach(links.tokens)
        if tokens.key is not tokens.value:
            by_keys = reach(tokens.key)
        noise_gram = head.value_noise.gram(head.metric, tokens.source, tokens.value)
        noise = LandmarkProducts.of(
            noise_gram.dense(), noise_gram.averaged(weights, common), weights, at
        )
        own_value = None
        if head.value_noise.own is not None:
            shared = jnp.sum(head.value_noise.features * head.metric)
            own_value = jnp.sum((noise.crossed - shared * common) * weights, axis=1)
            own_value = nonnegative(own_value)
        products = LandmarkProducts(
            under_value @ value.T + noise.values,
            by_mean.crossed + noise.crossed,
            by_mean.averages + noise.own,
            under_average @ average[at].T + noise.meeting,
            at,
        )
        terms = tuple(LandmarkTerm.of(term, weights, by_keys, products) for term in rows.terms)
        return Seen(terms, products, noise, own_value, common, linked)

    def sum_noise(self, seen: Seen, weights: Array, mean: Array, gain: Array) -> SumNoise:
        """The contribution of score noise to the sum over tokens, as sums over the landmarks."""
        head, pool = self.moments, self.tokens.pool
        values, size, at = self.centres.value, weighted(gain[:, None], pool), seen.products.at
        noise = seen.noise.over(head.value_size())
        terms = (term.summed(size, weights, at) for term in seen.terms)
        few = Products(noise.values, noise.crossed[at], noise.meeting[at])
        summed = sum_noise(terms, weights[at], values, mean[at], few)
        return bounded_sum(summed, weights, values, mean, noise.sizes(), pool)


class LandmarkRows(NamedTuple):
    """Cov[S_ac, S_bf], a sum of Kronecker products with the keys' sides in factored form."""

    terms: tuple[KeyNoise, ...]
    own: Array  # diagonal of the queries' side, merged over the terms, (T, 1)
    num_landmarks: int
    exists: Array | None  # which queries may be landmarks, (T,)

    def expected_softmax(self, scores: Array, mask: Array | None) -> Array:
        """E[softmax] of scores with these means, (T, S)."""
        weights = masked_softmax(scores, mask)
        keys = self.terms[0].keys.dense() + self.terms[1].keys.dense()
        spread = jnp.sum(weights**2 * rows_diagonal(keys)[None, :], axis=1)
        size, count = safe_sqrt(self.own[:, 0] * spread), self.num_landmarks // 2
        few = weights[choose_landmarks(size, count, self.exists)]
        shift = keys @ jnp.mean(few, axis=0)
        shift = shift - 0.5 * jnp.mean(few @ shift)
        keys = keys - shift[:, None] - shift[None, :]
        contrasts = _Contrasts(
            self.own, rows_diagonal(keys), Sketch.of(keys, few), Sketch.of(keys**2, few)
        )
        return expected_softmax(scores, contrasts, mask)

    def variance(self) -> Array:
        """Var[S_ac], (T, S)."""
        by_keys, by_queries = (
            rows_diagonal(term.queries)[:, None] * term.keys.diagonal()[None, :]
            for term in self.terms
        )
        return by_keys + by_queries


class _Contrasts(NamedTuple):
    """Covariance of the rows: a `ScoreCovariance`."""

    own: Array  # (T, 1)
    diagonal: Array  # (S,)
    keys: Sketch
    squares: Sketch

    def variance(self) -> Array:
        return self.own * self.diagonal[None, :]

    def matvec(self, vectors: Array) -> Array:
        return self.own * self.keys.product(vectors)

    def square_matvec(self, vectors: Array, unit: Array) -> Array:
        return (self.own / unit) ** 2 * self.squares.product(vectors)


class LandmarkProducts(NamedTuple):
    """Expected inner products as in `Products`, but of averages with the landmarks' averages only."""

    values: Array  # (S, S)
    crossed: Array  # (T, S)
    own: Array  # of averages with themselves, (T,)
    meeting: Array  # with those of the landmarks, (T, M)
    at: Array  # positions of the landmarks, (M,)

    @classmethod
    def of(cls, values: Array, crossed: Array, weights: Array, at: Array) -> LandmarkProducts:
        """Build from the values' products and those with the averages."""
        own = jnp.sum(crossed * weights, axis=1)
        return cls(values, crossed, own, crossed @ weights[at].T, at)

    @property
    def averages(self) -> Array:
        """Averages with averages, (T, T), by regression."""
        result = Regression.on(self.meeting[self.at]).between(self.meeting, self.meeting)
        root = safe_sqrt(self.own)
        bound = root[:, None] * root[None, :]
        return jnp.where(on_diagonal(result.shape), bound, jnp.clip(result, -bound, bound))

    def sizes(self) -> Sizes:
        """The diagonals, as `Sizes`."""
        return Sizes(rows_diagonal(self.values), self.crossed, self.own)

    def over(self, size: Array) -> LandmarkProducts:
        """All divided by a size (1, 1)."""
        values, crossed, own, meeting = (
            safe_divide(part, size)
            for part in (self.values, self.crossed, self.own[:, None], self.meeting)
        )
        return LandmarkProducts(values, crossed, own[:, 0], meeting, self.at)


class LandmarkTerm(NamedTuple):
    """A Kronecker product of the scores' covariance, see `Term` and `ScoreTerm`."""

    queries: Array  # (T, T)
    contrasts: Array  # (S, S)
    pulled: Array  # W times the contrasts, (T, S)
    meeting: Array  # sum_cf contrasts_cf E <u_ac, u_mf> with landmarks m, (T, M)
    regression: Regression

    @classmethod
    def of(
        cls, term: KeyNoise, weights: Array, reach: Array, products: LandmarkProducts
    ) -> LandmarkTerm:
        """Build from the weights W (T, S) and their `reach`, W P."""
        at, few = products.at, weights[products.at]
        keys = term.keys.dense()
        own = 0.5 * rows_diagonal(keys)
        contrasts = keys - own[:, None] - own[None, :]
        pulled = term.keys.averaged(weights, reach) - (weights @ own)[:, None] - own[None, :]
        right = (contrasts * products.values) @ few.T - (pulled[at] * products.crossed[at]).T
        meeting = weights @ right - (pulled * products.crossed) @ few.T
        meeting = meeting + products.meeting * (pulled @ few.T)
        return cls(term.queries, contrasts, pulled, meeting, Regression.on(meeting[at]))

    def quadratic(self, weights: Array, products: LandmarkProducts) -> Array:
        """`SeenTerm.quadratic` between all queries, (T, T), by regression."""
        return self.regression.between(self.meeting, self.meeting)

    def summed(self, size: Array, weights: Array, at: Array) -> Summed:
        """The term in a sum over rows with weights `size` (T, 1), as a sum over landmarks."""
        shares = size * self.regression.weights(self.meeting, jnp.ones_like(size[:, 0]))
        few = self.pulled[at]
        return Summed(shares.T @ (self.queries @ shares), self.contrasts, few, few @ weights[at].T)
