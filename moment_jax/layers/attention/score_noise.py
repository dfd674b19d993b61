"""What the noise of one head's scores makes of the averaged values."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import nonnegative, pooled, safe_divide, safe_sqrt
from moment_jax.xla import (
    materialized,
    product_of_transposed,
    rows_diagonal,
    rows_product,
)

Array = jax.Array


class ScoreTerm(Protocol):
    """A Kronecker product of the scores' covariance."""

    @property
    def queries(self) -> Array:
        """The queries' side, (T, T)."""
        ...

    def quadratic(self, weights: Array, products: Any) -> Array:
        """What the keys' side makes of the values, (T, T): see `Term.quadratic`."""
        ...


class Products(NamedTuple):
    """E of inner products of the values v_c and their averages A_a, the noise of the values included.

    Inner products over one head's features, plain or under a metric.
    """

    values: Array  # E <v_c, v_f>, (S, S)
    crossed: Array  # E <A_a, v_c>, (T, S)
    averages: Array  # E <A_a, A_b>, (T, T)

    def sizes(self) -> Sizes:
        """Those of single values and averages."""
        return Sizes(rows_diagonal(self.values), self.crossed, rows_diagonal(self.averages))


class Sizes(NamedTuple):
    """E of inner products as in `Products`, of values and averages with themselves."""

    values: Array  # E |v_c|^2, (S,)
    crossed: Array  # E <A_a, v_c>, (T, S)
    averages: Array  # E |A_a|^2, (T,)

    def spread(self) -> Array:
        """E |v_c - A_a|^2, (T, S)."""
        return self.values[None, :] - 2 * self.crossed + self.averages[:, None]

    def within(self, weights: Array) -> Array:
        """The variance of the values under the weights W, (T,)."""
        second = jnp.sum(weights * self.values[None, :], axis=1)
        return left_within(second, self.averages)


def total_of(arrays: Iterable[Any]) -> Array:
    """Their sum, without a zero to begin with."""
    total: Array = functools.reduce(operator.add, arrays)
    return total


class ScoreNoise(NamedTuple):
    """What the scores' noise gives weights @ values."""

    token_gram: Array  # (T, T)
    gain: Array  # see `saturation`, (T,)


def score_noise(
    terms: Iterable[ScoreTerm], weights: Array, products: Any, order: int
) -> ScoreNoise:
    """The token Gram matrix sum_cf Cov[W_ac, W_bf] E <v_c, v_f>, for scores independent of the values.

    The scores' noise passes the softmax's Jacobian times `saturation`, which with order 1 is 1.

    Args:
      terms: of the covariance of the scores.
      weights: E[W], (T, S).
      products: of the values, as the terms take them.
      order: 1 or 2.
    """
    token_gram = total_of(term.queries * term.quadratic(weights, products) for term in terms)
    own = rows_diagonal(token_gram)
    gain = jnp.ones_like(own)
    if order == 2:
        within = products.sizes().within(weights)
        gain = saturation(own, within)
        # Where a row gives all its weight to one key, only rounding is left. XLA may compute it twice,
        # and round it differently: then the gain does not bound it.
        own = jnp.minimum(gain**2 * own, within)
    token_gram = gain[:, None] * token_gram * gain[None, :]
    root = safe_sqrt(own)
    bound = root[:, None] * root[None, :]
    return ScoreNoise(jnp.clip(token_gram, -bound, bound), gain)


class SumNoise(NamedTuple):
    """What the scores' noise gives the sum over the rows, sum_a p_a A_a with A = W v."""

    features: Array  # by the mean values, (K, K)
    pattern: Array  # by a token pattern of the values' noise, ()


def sum_noise(
    terms: Iterable[Summed],
    weights: Array,
    values: Array,
    mean: Array,
    noise: Products,
    pool: Array | None = None,
) -> SumNoise:
    """sum_ab p_a p_b sum_cf Cov[W_ac, W_bf] v_c v_f^T, and the same with a pattern n_cf for v_c v_f^T.

    Args:
      terms: of the covariance of the scores.
      weights: E[W], (T, S).
      values: v, (S, K).
      mean: W v, (T, K).
      noise: the pattern n, and its products with the weights, W n and W n W^T.
      pool: p, (T,); None for one each.
    """
    # The same for all keys moves nothing, but rounding; keys that no row of the sum sees have no part.
    count = pooled(jnp.ones_like(mean[:, :1]), pool)
    centre = safe_divide(pooled(mean, pool), count)[None, :]
    values, mean = values - centre, mean - centre

    def parts(term: Summed) -> tuple[Array, Array, Array]:
        pairs, contrasts, pulled, met = term
        paired = materialized(rows_product(materialized(pairs), weights))
        outer = contrasts * product_of_transposed(weights, paired)
        return outer, paired * pulled, pairs * met

    outer, near, far = (total_of(same) for same in zip(*map(parts, terms), strict=True))
    bent = values.T @ (0.5 * (outer @ values) - near.T @ mean)
    features = bent + bent.T + mean.T @ (far @ mean)
    pattern = jnp.sum(outer * noise.values) + jnp.sum(far * noise.averages)
    return SumNoise(features, pattern - 2 * jnp.sum(near * noise.crossed))


class Summed(NamedTuple):
    """A Kronecker product of the scores' covariance in the sum over the rows."""

    pairs: Array  # p_a p_b times the gains of the softmax and the queries' side, (T, T)
    contrasts: Array  # see `Term`, (S, S)
    pulled: Array  # W times them, (T, S)
    met: Array  # and that times W^T, (T, T)


def bounded_sum(
    summed: SumNoise,
    weights: Array,
    values: Array,
    mean: Array,
    noise: Sizes,
    pool: Array | None = None,
) -> SumNoise:
    """Within Cauchy and Schwarz, by Cov[W_a] <= diag(E[W_a]) - E[W_a] E[W_a]^T.

    For rows that are saturated: there rounding is all that is left. Arguments are those of `sum_noise`,
    `noise` the sizes of its `noise`.
    """
    root = pooled(safe_sqrt(left_within(weights @ values**2, mean**2)), pool)
    most = pooled(safe_sqrt(noise.within(weights)), pool) ** 2
    bound = root[:, None] * root[None, :]
    return SumNoise(jnp.clip(summed.features, -bound, bound), jnp.clip(summed.pattern, 0, most))


def saturation(from_scores: Array, within: Array) -> Array:
    """How much of its Jacobian the softmax keeps on average, in (0, 1].

    By Price's theorem noise passes the expected Jacobian, diag(E[w]) - E[w w^T]. That is smaller than
    J = diag(w) - w w^T at the mean weights w, because E[w w^T] holds Cov[w]: it is taken as gain J with
    one gain for each row, for which the variance from the scores and what is left of the variance of
    the values under the weights add up, as the law of total variance demands:

        gain^2 V + gain W = W.

    Where a row gives all its weight to one key, both are 0 but for rounding, and so is the gain.

    Args:
      from_scores: V, the variance that the scores' noise gives weights @ values through J.
      within: W, the variance of the values under the mean weights, see `left_within`.
    """
    ratio = safe_divide(nonnegative(from_scores), within)
    return jnp.where(within > 0, 2 / (1 + jnp.sqrt(1 + 4 * ratio)), 0)


def left_within(second: Array, averaged: Array) -> Array:
    """The variance of the values under the weights: of E[v^2] less E[A^2], 0 where it is rounding."""
    within = second - averaged
    return jnp.where(within > 16 * jnp.finfo(within.dtype).eps * second, within, 0)
