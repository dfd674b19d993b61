"""The linear map by which attention carries the covariance of its input."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.layers.attention.inputs import Mixing, merge_heads, split_heads

Array = jax.Array


class AttentionTangent(NamedTuple):
    """Attention linearised: weights and means as they stand in the moments of its output."""

    query: Array  # mean of the queries, (T, H K)
    key: Array  # (T, H K)
    value: Array  # (T, H K)
    mixing: Mixing  # weights (H, T, T) and gain
    query_kernel: Array  # (D, H K)
    key_kernel: Array  # (D, H K)
    value_kernel: Array  # (D, H K)
    output_kernel: Array  # (H K, D)

    def __call__(self, change: Array) -> Array:
        """The change of the output, (T, D), with a change of the input, (T, D)."""
        weights = self.mixing.weights
        h = weights.shape[0]
        q, k, v = (split_heads(mean, h) for mean in (self.query, self.key, self.value))
        dq, dk, dv = (
            split_heads(change @ kernel, h)
            for kernel in (self.query_kernel, self.key_kernel, self.value_kernel)
        )
        scores = jnp.einsum("had,hcd->hac", dq, k) + jnp.einsum("had,hcd->hac", q, dk)
        scores = scores / jnp.sqrt(jnp.asarray(q.shape[2], scores.dtype))
        centred = scores - jnp.sum(weights * scores, axis=2, keepdims=True)
        by_scores = (weights * centred) @ v
        if self.mixing.gain is not None:
            by_scores = self.mixing.gain[:, :, None] * by_scores
        mixed = weights @ dv + by_scores
        return merge_heads(mixed) @ self.output_kernel

    def value_paths(self) -> Array:
        """For each head the diagonal of value_kernel @ output_kernel, (H, D)."""
        h, d = self.mixing.weights.shape[0], self.value_kernel.shape[0]
        paths = self.value_kernel * self.output_kernel.T
        return jnp.sum(paths.reshape(d, h, -1), axis=2).T
