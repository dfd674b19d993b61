"""Noise of queries, keys and values in `Separable`'s attention, head by head.

All are dense layers y = x @ kernel + bias of a random sequence x. The noise of x is taken as Cov[x_ti,
x_sj] = P_ts F_ij, with its token Gram matrix over the sum of its entries and the covariance of its sum
over tokens. The noise of a kernel is kept per feature: variances of a trained posterior differ by
orders of magnitude, so heads see different features of x, and one token pattern for all heads is off by
a tenth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Separable
from moment_jax.covariance.numerics import gram, pooled, safe_divide, vector_cov, weighted
from moment_jax.covariance.separable_grams import FeatureGram
from moment_jax.layers.attention.inputs import DenseInput
from moment_jax.posterior import Point
from moment_jax.xla import diagonal_of, materialized


class OwnNoise(NamedTuple):
    """Noise that heads do not share: that of a kernel and bias with uncorrelated entries."""

    kernel: Array  # variances, (D, K)
    shared: Array  # variance of y from kernel noise times noise in x, over the pattern P, (K,)
    bias: Array  # variances, (K,)


class HeadNoise(NamedTuple):
    """Noise of one head's queries, keys or values y."""

    features: Array  # noise that heads share, over the pattern P, (K, K)
    own: OwnNoise | None  # None if `features` holds all noise

    def own_gram(self, metric: Array, mean: Array, pattern: Array, extra: Any = 0.0) -> Array:
        """sum_ij metric_ij Cov[y_ti, y_sj] from the head's own noise, and `extra` times P, (T, T).

        Takes the metric (K, K), the mean of x (T, D) and the pattern P (T, T).
        """
        assert self.own is not None
        diagonal = diagonal_of(metric)
        size, constant = jnp.sum(self.own.shared * diagonal), jnp.sum(self.own.bias * diagonal)
        by_mean = jnp.sum(self.own.kernel * diagonal[None, :], axis=1)
        return materialized(gram(mean, by_mean)) + (size + extra) * pattern + constant

    def gram(self, metric: Array, mean: Array, pattern: Array) -> Array:
        """The same from all of the head's noise, (T, T)."""
        shared = jnp.sum(self.features * metric)
        if self.own is None:
            return shared * pattern
        return self.own_gram(metric, mean, pattern, shared)


class Projected(NamedTuple):
    """All heads' queries, keys or values."""

    source: DenseInput[Separable]
    whole: Array  # features of the noise that heads share, (H K, H K)
    pulled: Array  # Cov[sum_t x_t] times the kernel, (D, H K)
    pattern: Array  # P, (T, T)
    heads: HeadNoise  # leading axis H

    @classmethod
    def of(
        cls, source: DenseInput[Separable], cov: Separable, pattern: Array, num_heads: int
    ) -> Projected:
        """The noise of y, from x and its dense layer, and the covariance of y, of shape (T, H K).

        `pattern` is that of x, see `over_sum`; only kernels with uncorrelated entries use it.
        """
        _, x, params = source
        if not params.kernel.uncorrelated:
            whole = cov.features()
            heads = HeadNoise(whole.blocks(num_heads), None)
            pulled = x.feature_gram() @ params.kernel.mean
            return cls(source, whole.dense(), pulled, over_sum(cov), heads)
        variance = params.kernel.marginal_variance()
        width = variance.shape[1] // num_heads
        bias = jnp.zeros_like(variance[0])
        if params.bias is not None:
            bias = params.bias.marginal_variance()
        features = x.features()
        own = OwnNoise(
            variance.reshape(-1, num_heads, width).swapaxes(0, 1),
            (features.diag() @ variance).reshape(num_heads, width),
            bias.reshape(num_heads, width),
        )
        mapped = cov.features().without_noise()  # as the dense layer mapped it
        if mapped.basis is None:  # the factors are no longer known
            mapped = FeatureGram.through(features.dense(), params.kernel.mean)
        assert mapped.basis is not None
        heads = HeadNoise(mapped.blocks(num_heads), own)
        return cls(source, mapped.dense(), mapped.basis.pulled, pattern, heads)

    def contrasts(self, pool: Array | None) -> Array:
        """Feature Gram matrices of y minus its weighted average over tokens, (H, K, K).

        The common part of all keys is most of their noise, and softmax ignores it.
        """
        mean, cov, _ = self.source
        rows, share = centred_rows(mean, pool)
        energy = _trace(cov, pool) - jnp.sum(weighted(cov.token_gram() @ share, pool))
        return self._under(energy, rows, None)

    def by_token(self, pool: Array | None) -> Array:
        """sum_t p_t Cov[y_td, y_te] with weights p (T,), or ones, (H, K, K)."""
        mean, cov, _ = self.source
        count = jnp.sum(weighted(jnp.ones_like(mean[:, 0]), pool))
        rows = weighted(mean, None if pool is None else jnp.sqrt(pool))
        return self._under(_trace(cov, pool), rows, count)

    def of_sums(self, weights: Array, pool: Array | None) -> Array | None:
        """Variances of sum_a p_a sum_c W_ac y_c from each head's own noise, (H, K), or None.

        Takes the weights W (H, T, S) and p (T,), None for ones.
        """
        own, mean = self.heads.own, self.source.mean
        if own is None:
            return None
        total = jax.vmap(pooled, (0, None))(weights, pool)  # (H, S)
        energy = jnp.sum((total @ self.pattern) * total, axis=1, keepdims=True)
        moment = (total @ mean) ** 2
        by_kernel = jnp.einsum("hd,hdk->hk", moment, own.kernel) + energy * own.shared
        return by_kernel + jnp.sum(total, axis=1, keepdims=True) ** 2 * own.bias

    def _under(self, energy: Array, rows: Array, count: Array | None) -> Array:
        """sum_ts g_ts Cov[y_td, y_se] for a quadratic form g in the tokens, (H, K, K).

        Takes `energy`, sum_ts g_ts G_ts with the token Gram matrix G of x, (); `rows`, a root of g
        times the mean of x, (R, D); and `count`, sum_ts g_ts, or None if it is zero, ().
        """
        _, cov, params = self.source
        kernel, h = params.kernel, self.heads.features.shape[0]
        energy = safe_divide(energy, _sum(cov))
        features = cov.features().times(energy)
        if self.heads.own is not None:
            moment = features.diag() + jnp.sum(rows**2, axis=0)
            noise = FeatureGram(diagonal=kernel.noise_variance(0 * moment, moment)).blocks(h)
            result = self.heads.features * energy + noise
        else:
            noise = FeatureGram(kernel.noise_block(features.dense() + gram(rows.T))).blocks(h)
            result = features.map(kernel.mean).blocks(h) + noise
        if count is None or params.bias is None or isinstance(params.bias, Point):
            return result
        return result + FeatureGram(count * vector_cov(params.bias.vector_cov())).blocks(h)


def centred_rows(rows: Array, pool: Array | None) -> tuple[Array, Array]:
    """Rows (T, D) minus their average, times the roots of their weights; and their shares, (T,)."""
    used = jnp.ones(rows.shape[0], rows.dtype) if pool is None else pool
    share = used / jnp.maximum(jnp.sum(used), 1)
    return jnp.sqrt(used)[:, None] * (rows - (share @ rows)[None, :]), share


def over_sum(cov: Separable) -> Array:
    """The token Gram matrix over the pooled sum of its entries; zero if that is zero."""
    total = jnp.broadcast_to(_sum(cov), (1, 1))
    return safe_divide(cov.token_gram(), total)


def _sum(cov: Separable) -> Array:
    """The pooled sum of the token Gram matrix, ()."""
    return jnp.sum(weighted(pooled(cov.token_gram(), cov.pool), cov.pool))


def _trace(cov: Separable, pool: Array | None) -> Array:
    """The weighted trace of the token Gram matrix, ()."""
    return jnp.sum(weighted(diagonal_of(cov.token_gram()), pool))
