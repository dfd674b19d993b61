"""Covariance of one head's scores in two Kronecker terms, and how it passes the softmax."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance.numerics import safe_divide

Array = jax.Array


class RowCovariance(NamedTuple):
    """Cov[S_ac, S_bf] = alpha_ab key_cov_cf + beta_ab key_mean_cf."""

    alpha: Array  # (T, T)
    beta: Array  # (T, T)
    key_cov: Array  # (S, S)
    key_mean: Array  # (S, S)

    def matvec(self, weights: Array) -> Array:
        """sum_f Cov[S_ac, S_af] weights_af, (T, S)."""
        alpha, beta = jnp.diagonal(self.alpha)[:, None], jnp.diagonal(self.beta)[:, None]
        return alpha * (weights @ self.key_cov) + beta * (weights @ self.key_mean)

    def square_matvec(self, weights: Array) -> Array:
        """sum_f Cov[S_ac, S_af]^2 weights_af, (T, S)."""
        alpha, beta = jnp.diagonal(self.alpha)[:, None], jnp.diagonal(self.beta)[:, None]
        return (
            alpha**2 * (weights @ self.key_cov**2)
            + 2 * alpha * beta * (weights @ (self.key_cov * self.key_mean))
            + beta**2 * (weights @ self.key_mean**2)
        )

    def variance(self) -> Array:
        """Var[S_ac], (T, S)."""
        alpha, beta = jnp.diagonal(self.alpha)[:, None], jnp.diagonal(self.beta)[:, None]
        return (
            alpha * jnp.diagonal(self.key_cov)[None, :]
            + beta * jnp.diagonal(self.key_mean)[None, :]
        )


class ThroughSoftmax(NamedTuple):
    """What the noise of the scores does to weights @ values."""

    token_gram: Array  # (T, T)
    inner: Array  # the feature Gram matrix is sum_cf inner_cf E[v_cd v_fe], (S, S)
    gain: Array  # E[softmax's Jacobian] over that at the mean weights, (T,)


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


def through_softmax(
    rows: RowCovariance, weights: Array, moment: Array, order: int
) -> ThroughSoftmax:
    """Covariance of sum_c W_ac v_cd from the scores, W = softmax(S), summed over d or over a.

    It passes the Jacobian times `saturation`, which with order 1 is 1.

    Args:
      rows: covariance of the scores.
      weights: E[W], (T, S).
      moment: sum_d E[v_cd v_fd], (S, S).
      order: 1 or 2.
    """
    crossed = moment @ weights.T
    squared = weights @ crossed
    by_cov, pulled_cov = _quadratic(rows.key_cov, weights, moment, crossed, squared)
    by_mean, pulled_mean = _quadratic(rows.key_mean, weights, moment, crossed, squared)
    token_gram = rows.alpha * by_cov + rows.beta * by_mean
    alpha, beta = jnp.diagonal(rows.alpha), jnp.diagonal(rows.beta)
    gain = jnp.ones_like(alpha)
    if order == 2:
        within = weights @ jnp.diagonal(moment) - jnp.diagonal(squared)
        gain = saturation(jnp.diagonal(token_gram), within)
        token_gram = gain[:, None] * token_gram * gain[None, :]
        alpha, beta = alpha * gain**2, beta * gain**2
    alpha, beta = alpha[:, None], beta[:, None]
    # sum_a (alpha_a Kc + beta_a KK)_gh Jbar_a,cg Jbar_a,fh, (S, S)
    pulled = alpha * pulled_cov + beta * pulled_mean  # (T, S)
    total = jnp.sum(weights * pulled, axis=1, keepdims=True)
    bent = weights.T @ (0.5 * total * weights - weights * pulled)
    inner = (
        rows.key_cov * (weights.T @ (alpha * weights))
        + rows.key_mean * (weights.T @ (beta * weights))
        + bent
        + bent.T
    )
    return ThroughSoftmax(token_gram, inner, gain)


def _quadratic(
    inner: Array, weights: Array, moment: Array, crossed: Array, squared: Array
) -> tuple[Array, Array]:
    """sum_cf inner_cf sum_d u_ac^d u_bf^d, u_ac^d = W_ac (v_cd - A_ad), (T, T); and W inner, (T, S)."""
    pulled = inner @ weights.T
    mixed = weights @ (crossed * pulled)
    result = weights @ (inner * moment) @ weights.T - mixed - mixed.T + squared * (weights @ pulled)
    return result, pulled.T
