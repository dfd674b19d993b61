"""Noise of `Separable`'s values, averaged by the attention weights of all heads."""

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import nonnegative, pooled
from moment_jax.xla import diagonal_of, on_diagonal


class ValueNoise:
    """Cov = sum_cf W^h_ac W^g_bf Cov[v_cd, v_fe], d in head h and e in head g.

    The values' covariance is taken as Cov[v_cd, v_fe] = V_cf F_de, with their token Gram matrix over
    the sum of its entries and their feature Gram matrix, which keeps all heads' averages correlated.

    Args:
      features: feature Gram matrix of all heads' values, (H K, H K).
      weights: mean attention weights, (H, T, S).
      reach: the weights times the token pattern V, (H, T, S).
      pool: weights of the averages in the sum over them, (T,); None for ones.
    """

    def __init__(self, features: Array, weights: Array, reach: Array, pool: Array | None) -> None:
        self.features = features
        h = weights.shape[0]
        self.blocks = (h, self.features.shape[0] // h)
        self.weights, self.reach = weights, reach
        self.overlaps = jnp.einsum("hac,gac->ahg", reach, weights)  # (T, H, H)
        total, reached = (jax.vmap(pooled, (0, None))(x, pool) for x in (weights, reach))
        self.shares = reached @ total.T  # (H, H)

    def token_gram(self, metric: Array) -> Array:
        """Token Gram matrix between different heads, under a metric (H K, H K), (T, T)."""
        h = self.weights.shape[0]
        # Rows first: splitting the last axis of a large array moves it on a TPU.
        rows = jnp.sum((self.features * metric).reshape(*self.blocks, -1), axis=1)
        shares = jnp.sum(rows.reshape(h, *self.blocks), axis=2)
        shares = jnp.where(on_diagonal(shares.shape), 0, shares)
        others = jnp.einsum("hg,gbc->hbc", shares, self.weights)
        return jnp.einsum("hac,hbc->ab", self.reach, others)

    def variance(self) -> Array:
        """Variances of the heads' averages, (T, H K)."""
        own = jnp.einsum("ahh->ah", self.overlaps)
        diagonal = diagonal_of(self.features).reshape(self.blocks)
        return (own[:, :, None] * diagonal[None]).reshape(own.shape[0], -1)

    def feature_gram(self) -> Array:
        """Covariance of the sum over tokens, (H K, H K)."""
        width = self.blocks[1]
        by_row = self.features.reshape(*self.blocks, -1)
        return (by_row * jnp.repeat(self.shares, width, axis=1)[:, None]).reshape(
            self.features.shape
        )

    def mapped_variance(self, kernel: Array) -> Array:
        """Variances of the averages times a kernel (H K, D), (T, D)."""
        h, width = self.blocks
        split = kernel.reshape(h, width, -1)
        # For each pair of heads; slice before multiplying, since the products are larger.
        blocks = self.features.reshape(h, width, h, width).swapaxes(1, 2)
        pulled = blocks @ split[None]  # (H, G, K, D)
        pairs = jnp.sum(split[:, None] * pulled, axis=2)
        return nonnegative(self.overlaps.reshape(-1, h * h) @ pairs.reshape(h * h, -1))
