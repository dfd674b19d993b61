"""Attention linearised in its input."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.layers.attention.inputs import (
    Mixing,
    Turns,
    merge_heads,
    root_width,
    split_heads,
    turned,
)


class AttentionTangent(NamedTuple):
    """Linearised attention, with the weights and means used for its output's moments."""

    query: Array  # mean of the queries, (T, H K)
    key: Array  # (S, H K)
    value: Array  # (S, H K)
    mixing: Mixing
    query_kernel: Array  # (D, H K)
    source_kernels: tuple[Array, Array] | None  # of keys and values, (D, H K); None with a memory
    output_kernel: Array  # (H K, D)
    turns: Turns  # of queries and keys

    def __call__(self, change: Array) -> Array:
        """The change (T, D) of the output for a change (T, D) of the input."""
        weights = self.mixing.weights
        h = weights.shape[0]
        q, k, v = (split_heads(mean, h) for mean in (self.query, self.key, self.value))
        dq = turned(change @ self.query_kernel, self.turns[0])
        scores = jnp.einsum("had,hcd->hac", split_heads(dq, h), k)
        straight = jnp.zeros_like(q)
        if self.source_kernels is not None:
            dk, dv = (change @ kernel for kernel in self.source_kernels)
            dk, dv = split_heads(turned(dk, self.turns[1]), h), split_heads(dv, h)
            scores, straight = scores + jnp.einsum("had,hcd->hac", q, dk), weights @ dv
        scores = scores / jnp.sqrt(jnp.asarray(q.shape[2], scores.dtype))
        centred = scores - jnp.sum(weights * scores, axis=2, keepdims=True)
        by_scores = (weights * centred) @ v
        if self.mixing.gain is not None:
            by_scores = self.mixing.gain[:, :, None] * by_scores
        return merge_heads(straight + by_scores) @ self.output_kernel

    def query_jacobian(self, own: Array, v: Array, mean: Array) -> Array:
        """The average Jacobian of a head's output with respect to its queries, (H, K, K).

        d A_a / d q_a = sum_c W_ac k_c (v_c - A_a)^T / sqrt(K), averaged with the tokens' shares `own`
        (T,). `v` are the mean values (H, S, K), and `mean` is A = W v (H, T, K).
        """
        weights = self.mixing.weights
        k, shares = split_heads(self.key, v.shape[0]), own[None]
        if self.mixing.gain is not None:
            shares = shares * self.mixing.gain
        else:
            shares = jnp.broadcast_to(shares, weights.shape[:2])
        seen = jnp.einsum("ht,htc->hc", shares, weights)
        result = jnp.einsum("hcd,hc,hce->hde", k, seen, v)
        result = result - jnp.einsum("htd,ht,hte->hde", weights @ k, shares, mean)
        return result / root_width(v)

    def key_jacobian(self, linked: Array, v: Array, mean: Array) -> Array:
        """The same for its keys, averaged with W times the tokens' covariance, (H, T, S).

        d A_a / d k_c = W_ac q_a (v_c - A_a)^T / sqrt(K).
        """
        if self.mixing.gain is not None:
            linked = linked * self.mixing.gain[:, :, None]
        left = linked @ v - jnp.sum(linked, axis=2)[..., None] * mean
        result = jnp.einsum("htd,hte->hde", split_heads(self.query, v.shape[0]), left)
        return result / root_width(v)

    def value_paths(self) -> Array | None:
        """Each head's diagonal of value_kernel @ output_kernel, (H, D); None with a memory."""
        if self.source_kernels is None:
            return None
        value_kernel = self.source_kernels[1]
        h, d = self.mixing.num_heads(), value_kernel.shape[0]
        paths = value_kernel * self.output_kernel.T
        return jnp.sum(paths.reshape(d, h, -1), axis=2).T
