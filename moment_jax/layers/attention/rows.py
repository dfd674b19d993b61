"""Covariance of one head's scores as one Kronecker product, and how it passes the softmax."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_divide

Array = jax.Array


class RowCovariance(NamedTuple):
    """Cov[S_ac, S_bf] = queries_ab keys_cf."""

    queries: Array  # (T, T)
    keys: Array  # (S, S)

    def own(self) -> Array:
        """The queries' side of the covariance of a row with itself, (T, 1)."""
        return jnp.diagonal(self.queries)[:, None]

    def matvec(self, weights: Array) -> Array:
        """sum_f Cov[S_ac, S_af] weights_af, (T, S)."""
        return self.own() * (weights @ self.keys)

    def square_matvec(self, weights: Array) -> Array:
        """sum_f Cov[S_ac, S_af]^2 weights_af, (T, S)."""
        return self.own() ** 2 * (weights @ self.keys**2)

    def variance(self) -> Array:
        """Var[S_ac], (T, S)."""
        return self.own() * jnp.diagonal(self.keys)[None, :]


def kronecker_sum(
    first: RowCovariance, second: RowCovariance, centre: Array | None = None
) -> RowCovariance:
    """One Kronecker product in the place of a sum of two.

    The keys' side is the average that the queries have over the tokens; the queries' side keeps, for
    every pair of tokens, the total variance of contrasts of keys. On trained and random posteriors it
    lost nothing against the two terms, at half the products of (T, T) matrices.

    Args:
      first: one term.
      second: the other.
      centre: the quadratic form in keys whose trace is that total, (S, S); None for the identity.
    """

    def level(term: RowCovariance) -> Array:
        return jnp.mean(jnp.diagonal(term.queries))

    def total(matrix: Array) -> Array:
        return jnp.trace(matrix) if centre is None else jnp.sum(matrix * centre)

    keys = level(first) * first.keys + level(second) * second.keys
    queries = first.queries * total(first.keys) + second.queries * total(second.keys)
    return RowCovariance(safe_divide(queries, jnp.broadcast_to(total(keys), (1, 1))), keys)


class Average(NamedTuple):
    """Moments of sum_c W_ac v_cd, W = softmax(S), summed over d or over a."""

    by_values: Array  # token Gram matrix of the values' noise under the mean weights, (T, T)
    by_scores: Array  # token Gram matrix of the scores' noise, (T, T)
    inner: Array  # the feature Gram matrix of the scores' noise is sum_cf inner_cf E[v_cd v_fe], (S, S)
    gain: Array  # see `saturation`, (T,)
    reach: Array  # weights @ value_cov, (T, S)


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
    # With u_ac^d = W_ac (v_cd - A_ad): sum_cf keys_cf sum_d E[u_ac^d u_bf^d], multiplied out.
    crossed = mean @ values.T + reach  # sum_d E[A_ad v_cd], (T, S)
    squared = mean @ mean.T + by_values
    pulled = weights @ rows.keys
    mixed = (crossed * pulled) @ weights.T
    moment = values @ values.T + value_cov
    quadratic = (
        weights @ (rows.keys * moment) @ weights.T
        - mixed
        - mixed.T
        + squared * (pulled @ weights.T)
    )
    by_scores = rows.queries * quadratic
    own = jnp.diagonal(rows.queries)
    gain = jnp.ones_like(own)
    if order == 2:
        within = weights @ jnp.diagonal(moment) - jnp.diagonal(squared)
        gain = saturation(jnp.diagonal(by_scores), within)
        by_scores = gain[:, None] * by_scores * gain[None, :]
    # sum_a own_a gain_a^2 keys_gh J_a,cg J_a,fh
    scaled = (own * gain**2)[:, None] * weights
    total = jnp.sum(weights * pulled, axis=1, keepdims=True)
    bent = scaled.T @ (0.5 * total * weights - weights * pulled)
    inner = rows.keys * (scaled.T @ weights) + bent + bent.T
    return Average(by_values, by_scores, inner, gain, reach)


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
