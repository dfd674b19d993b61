"""Covariance of one head's scores in Kronecker products, and how it passes the softmax."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_divide

Array = jax.Array


class Term(NamedTuple):
    """A Kronecker product queries_ab keys_cf."""

    queries: Array  # (T, T)
    keys: Array  # (S, S)

    def own(self) -> Array:
        """The queries' side of the covariance of a row with itself, (T, 1)."""
        return jnp.diagonal(self.queries)[:, None]


class RowCovariance(NamedTuple):
    """Cov[S_ac, S_bf], a sum of Kronecker products."""

    terms: tuple[Term, ...]

    def matvec(self, weights: Array) -> Array:
        """sum_f Cov[S_ac, S_af] weights_af, (T, S)."""
        return _total(term.own() * (weights @ term.keys) for term in self.terms)

    def square_matvec(self, weights: Array) -> Array:
        """sum_f Cov[S_ac, S_af]^2 weights_af, (T, S)."""
        return _total(
            (1 if i == j else 2) * a.own() * b.own() * (weights @ (a.keys * b.keys))
            for i, a in enumerate(self.terms)
            for j, b in enumerate(self.terms)
            if i <= j
        )

    def variance(self) -> Array:
        """Var[S_ac], (T, S)."""
        return _total(term.own() * jnp.diagonal(term.keys)[None, :] for term in self.terms)

    def as_one_term(self, centre: Array) -> RowCovariance:
        """One Kronecker product in the place of the sum.

        The keys' side is the average that the queries have over the tokens; the queries' side keeps,
        for every pair of tokens, the total variance of contrasts of keys. On trained and random
        posteriors it lost nothing against two terms, at half the products of (T, T) matrices; but by
        the averages every token sees a little of every other.

        Args:
          centre: the quadratic form in keys whose trace is that total, (S, S).
        """
        keys = _total(jnp.mean(term.own()) * term.keys for term in self.terms)
        queries = _total(term.queries * jnp.sum(term.keys * centre) for term in self.terms)
        total = jnp.broadcast_to(jnp.sum(keys * centre), (1, 1))
        return RowCovariance((Term(safe_divide(queries, total), keys),))


def _total(arrays: Iterable[Array]) -> Array:
    return functools.reduce(operator.add, arrays)


class Average(NamedTuple):
    """Moments of sum_c W_ac v_cd, W = softmax(S), summed over d or over a."""

    by_values: Array  # token Gram matrix of the values' noise under the mean weights, (T, T)
    by_scores: Array  # token Gram matrix of the scores' noise, (T, T)
    inner: Array  # the feature Gram matrix of the scores' noise is sum_cf inner_cf E[v_cd v_fe], (S, S)
    gain: Array  # see `saturation`, (T,)


def average(
    rows: RowCovariance, weights: Array, mean: Array, values: Array, value_cov: Array, order: int
) -> Average:
    """Covariance of weights @ values for independent scores and values.

    The scores' noise passes the softmax's Jacobian times `saturation`, which with order 1 is 1.

    Args:
      rows: covariance of the scores.
      weights: E[W], (T, S).
      mean: weights @ values, (T, K).
      values: E[v], (S, K).
      value_cov: token Gram matrix of the values, (S, S).
      order: 1 or 2.
    """
    reach = weights @ value_cov
    by_values = reach @ weights.T
    crossed = mean @ values.T + reach  # sum_d E[A_ad v_cd], (T, S)
    squared = mean @ mean.T + by_values
    moment = values @ values.T + value_cov
    pulled = [weights @ term.keys for term in rows.terms]
    by_scores = _total(
        term.queries * _quadratic(term.keys, weights, moment, crossed, squared, part)
        for term, part in zip(rows.terms, pulled, strict=True)
    )
    gain = jnp.ones_like(jnp.diagonal(by_scores))
    if order == 2:
        within = weights @ jnp.diagonal(moment) - jnp.diagonal(squared)
        gain = saturation(jnp.diagonal(by_scores), within)
        by_scores = gain[:, None] * by_scores * gain[None, :]
    inner = _total(
        _inner(term.keys, weights, part, term.own() * gain[:, None] ** 2)
        for term, part in zip(rows.terms, pulled, strict=True)
    )
    return Average(by_values, by_scores, inner, gain)


def _quadratic(
    keys: Array, weights: Array, moment: Array, crossed: Array, squared: Array, pulled: Array
) -> Array:
    """sum_cf keys_cf sum_d E[u_ac^d u_bf^d] with u_ac^d = W_ac (v_cd - A_ad), multiplied out, (T, T)."""
    mixed = (crossed * pulled) @ weights.T
    inner = weights @ (keys * moment) @ weights.T
    return inner - mixed - mixed.T + squared * (pulled @ weights.T)


def _inner(keys: Array, weights: Array, pulled: Array, own: Array) -> Array:
    """sum_a own_a J_a,cg keys_gh J_a,hf with the softmax's Jacobians J_a, (S, S)."""
    scaled = own * weights
    total = jnp.sum(weights * pulled, axis=1, keepdims=True)
    bent = scaled.T @ (0.5 * total * weights - weights * pulled)
    return keys * (scaled.T @ weights) + bent + bent.T


def independent_variance(
    rows: RowCovariance, weights: Array, mean: Array, values: Array, variance: Array
) -> Array:
    """Var[sum_c W_ac v_cd] if keys were independent of each other, (T, K): a pattern for the true one.

    Args:
      rows: covariance of the scores.
      weights: E[W], (T, S).
      mean: weights @ values, (T, K).
      values: E[v], (S, K).
      variance: Var[v], (S, K).
    """
    squared = weights**2
    noisy = squared * rows.variance()
    result = (
        squared @ variance
        + noisy @ (values**2 + variance)
        - 2 * mean * (noisy @ values)
        + mean**2 * jnp.sum(noisy, axis=1, keepdims=True)
    )
    return jnp.maximum(result, 0)


def saturation(from_scores: Array, within: Array) -> Array:
    """How much of its Jacobian the softmax keeps on average, in (0, 1].

    By Price's theorem noise passes the expected Jacobian, diag(E[w]) - E[w w^T]. That is smaller than
    J = diag(w) - w w^T at the mean weights w, because E[w w^T] holds Cov[w]: it is taken as gain J with
    one gain for each row, for which the variance from the scores and what is left of the variance of
    the values under the weights add up, as the law of total variance demands:

        gain^2 V + gain W = W.

    Args:
      from_scores: V, the variance that the scores' noise gives weights @ values through J.
      within: W, the variance of the values under the mean weights.
    """
    ratio = safe_divide(jnp.maximum(from_scores, 0), jnp.maximum(within, 0))
    return 2 / (1 + jnp.sqrt(1 + 4 * ratio))
