"""The effect of one head's score noise on the averaged values."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import gram, nonnegative, pooled, safe_divide, safe_sqrt
from moment_jax.xla import diagonal_of, materialized

if TYPE_CHECKING:
    from moment_jax.layers.attention.rows import SeenTerm


class Products(NamedTuple):
    """Expected inner products of values v_c and their averages A_a, including the values' noise.

    Over one head's features, plain or under a metric.
    """

    values: Array  # E <v_c, v_f>, (S, S)
    crossed: Array  # E <A_a, v_c>, (T, S)
    averages: Array  # E <A_a, A_b>, (T, T)

    def sizes(self) -> Sizes:
        """The diagonals, as `Sizes`."""
        return Sizes(diagonal_of(self.values), self.crossed, diagonal_of(self.averages))


class Sizes(NamedTuple):
    """Expected squared norms of values and averages, and their inner products."""

    values: Array  # E |v_c|^2, (S,)
    crossed: Array  # E <A_a, v_c>, (T, S)
    averages: Array  # E |A_a|^2, (T,)

    def spread(self) -> Array:
        """E |v_c - A_a|^2, (T, S)."""
        return self.values[None, :] - 2 * self.crossed + self.averages[:, None]

    def within(self, weights: Array) -> Array:
        """Variance of the values under the weights W, (T,)."""
        second = jnp.sum(weights * self.values[None, :], axis=1)
        return left_within(second, self.averages)


def total_of(arrays: Iterable[Any]) -> Array:
    """The sum of arrays, without starting from zero."""
    total: Array = functools.reduce(operator.add, arrays)
    return total


class ScoreNoise(NamedTuple):
    """The contribution of score noise to weights @ values."""

    token_gram: Array  # (T, T)
    gain: Array  # see `saturation`, (T,)


def score_noise(
    terms: Iterable[SeenTerm], weights: Array, products: Products, order: int
) -> ScoreNoise:
    """Token Gram matrix sum_cf Cov[W_ac, W_bf] E <v_c, v_f>, for scores independent of the values.

    Noise passes through the softmax's Jacobian times `saturation`, which is 1 with order 1. Takes the
    terms of the scores' covariance, E[W] (T, S), and the values' products.
    """
    token_gram = total_of(term.queries * term.quadratic(weights, products) for term in terms)
    own = diagonal_of(token_gram)
    gain = jnp.ones_like(own)
    if order == 2:
        within = products.sizes().within(weights)
        gain = saturation(own, within)
        # A row with all its weight on one key is pure rounding. XLA may compute it twice with different
        # rounding, so the gain alone does not bound it.
        own = jnp.minimum(gain**2 * own, within)
    token_gram = gain[:, None] * token_gram * gain[None, :]
    root = safe_sqrt(own)
    bound = root[:, None] * root[None, :]
    return ScoreNoise(jnp.clip(token_gram, -bound, bound), gain)


class SumNoise(NamedTuple):
    """The contribution of score noise to the sum over rows, sum_a p_a A_a with A = W v."""

    features: Array  # from the mean values, (K, K)
    pattern: Array  # from a token pattern of the values' noise, ()


def sum_noise(
    terms: Iterable[Summed],
    weights: Array,
    values: Array,
    mean: Array,
    noise: Products,
    pool: Array | None = None,
) -> SumNoise:
    """sum_ab p_a p_b sum_cf Cov[W_ac, W_bf] v_c v_f^T, and the same with a pattern n_cf for v_c v_f^T.

    Takes E[W] (T, S), `values` v (S, K), `mean` W v (T, K), `noise` (n and its products W n and W n
    W^T), and p (T,), None for ones.
    """
    # A shift common to all values only adds rounding. Keys that no row of the sum sees must not count.
    count = pooled(jnp.ones_like(mean[:, :1]), pool)
    centre = safe_divide(pooled(mean, pool), count)[None, :]
    values, mean = values - centre, mean - centre

    def parts(term: Summed) -> tuple[Array, Array, Array]:
        pairs, contrasts, pulled, met = term
        paired = materialized(materialized(pairs) @ weights)
        outer = contrasts * (weights.T @ paired)
        return outer, paired * pulled, pairs * met

    outer, near, far = (total_of(same) for same in zip(*map(parts, terms), strict=True))
    bent = values.T @ (0.5 * (outer @ values) - near.T @ mean)
    features = bent + bent.T + gram(mean.T, far)
    pattern = jnp.sum(outer * noise.values) + jnp.sum(far * noise.averages)
    return SumNoise(features, pattern - 2 * jnp.sum(near * noise.crossed))


class Summed(NamedTuple):
    """A Kronecker product of the scores' covariance, in the sum over rows."""

    pairs: Array  # p_a p_b times the gains of the softmax and the queries' side, (T, T)
    contrasts: Array  # see `Term`, (S, S)
    pulled: Array  # W times `contrasts`, (T, S)
    met: Array  # `pulled` times W^T, (T, T)


def bounded_sum(
    summed: SumNoise,
    weights: Array,
    values: Array,
    mean: Array,
    noise: Sizes,
    pool: Array | None = None,
) -> SumNoise:
    """Clip to the Cauchy-Schwarz bound, using Cov[W_a] <= diag(E[W_a]) - E[W_a] E[W_a]^T.

    Needed for saturated rows, where only rounding is left. Arguments as in `sum_noise`; `noise` holds
    the sizes of its `noise`.
    """
    root = pooled(safe_sqrt(left_within(weights @ values**2, mean**2)), pool)
    most = pooled(safe_sqrt(noise.within(weights)), pool) ** 2
    bound = root[:, None] * root[None, :]
    return SumNoise(jnp.clip(summed.features, -bound, bound), jnp.clip(summed.pattern, 0, most))


def saturation(from_scores: Array, within: Array) -> Array:
    """The average fraction of its Jacobian that the softmax keeps under noise, in (0, 1].

    By Price's theorem noise passes through the expected Jacobian, diag(E[w]) - E[w w^T]. That is
    smaller than J = diag(w) - w w^T at the mean weights w, because E[w w^T] includes Cov[w]. It is
    taken as gain J with one gain per row, such that the variance from the scores and what remains of
    the values' variance under the weights satisfy the law of total variance:

        gain^2 V + gain W = W.

    If a row puts all its weight on one key, both are 0 up to rounding, and so is the gain.

    Args:
      from_scores: V, the variance of weights @ values from the scores' noise through J.
      within: W, the variance of the values under the mean weights, see `left_within`.
    """
    ratio = safe_divide(nonnegative(from_scores), within)
    return jnp.where(within > 0, 2 / (1 + jnp.sqrt(1 + 4 * ratio)), 0)


def left_within(second: Array, averaged: Array) -> Array:
    """Variance of the values under the weights: E[v^2] minus E[A^2], and 0 where that is rounding."""
    within = second - averaged
    return jnp.where(within > 16 * jnp.finfo(within.dtype).eps * second, within, 0)
