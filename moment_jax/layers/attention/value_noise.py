"""The noise of the values of `Separable`, averaged by the attention weights of all heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moment_jax.covariance import Separable
from moment_jax.covariance.numerics import safe_divide, safe_sqrt

Array = jax.Array


class Averages:
    """Noise of the values under the weights of all heads, Cov = sum_cf W^h_ac W^g_bf Cov[v_cd, v_fe].

    Each head has its own token Gram matrix; between two heads the pattern is that of all values,
    Vc / tr Vc, scaled to fit the heads' own.

    Args:
      cov: covariance of all heads' values, of shape (S, H K).
      weights: mean attention weights, (H, T, S).
      own: every head's token Gram matrix W Vc W^T, (H, T, T).
    """

    def __init__(self, cov: Separable, weights: Array, own: Array) -> None:
        self.gram = cov.feature_gram()
        self.own = own  # every head's token Gram matrix, (H, T, T)
        width = self.gram.shape[0] // weights.shape[0]
        self.blocks = (weights.shape[0], width, weights.shape[0], width)
        carried = weights @ over_trace(cov.token_gram())
        pooled = jnp.einsum("hac,hac->h", carried, weights)
        total = jnp.sum(jnp.diagonal(self.gram).reshape(-1, width), axis=1)
        fit = safe_sqrt(safe_divide(jnp.einsum("haa->h", own), total * pooled))[:, None, None]
        self.weights, self.carried = fit * weights, fit * carried  # (H, T, S)

    def feature_gram(self) -> Array:
        """(H K, H K)."""
        shares = jnp.einsum("hac,gac->hg", self.carried, self.weights)
        return (self.gram.reshape(self.blocks) * shares[:, None, :, None]).reshape(self.gram.shape)

    def token_gram(self, metric: Array) -> Array:
        """Under a metric (H K, H K) of the features, (T, T)."""
        h, t, s = self.weights.shape
        shares = jnp.sum((self.gram * metric).reshape(self.blocks), axis=(1, 3))
        own = jnp.diagonal(shares)
        others = (shares - jnp.diag(own)) @ self.weights.reshape(h, t * s)
        between = jnp.einsum("hac,hbc->ab", self.carried, others.reshape(h, t, s))
        total = jnp.einsum("hdhd->h", self.gram.reshape(self.blocks))
        return between + jnp.sum(safe_divide(own, total)[:, None, None] * self.own, axis=0)


def diagonal_blocks(matrix: Array, num_heads: int) -> Array:
    """(H K, H K) -> (H, K, K)."""
    width = matrix.shape[0] // num_heads
    return jnp.einsum("hdhe->hde", matrix.reshape(num_heads, width, num_heads, width))


def over_trace(matrix: Array) -> Array:
    """A matrix over its trace; zero where that is zero."""
    return safe_divide(matrix, jnp.broadcast_to(jnp.trace(matrix), (1, 1)))
