"""Attention for `Diagonal`, all heads, as plain JAX; see `diagonal_rows`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.layers.attention.diagonal_rows import Own, Part, Rows, Shared, shared_mean
from moment_jax.layers.attention.mix import each_head, mix
from moment_jax.layers.attention.places import at_own, own_entries, own_tokens

Array = jax.Array


class Heads(NamedTuple):
    """Moments of H heads of width K."""

    query: Part  # (H, T, K)
    key: Part  # (H, S, K)
    value: Part  # (H, S, K)
    shared: Shared  # variance (S, D) and kernels (H, D, K)
    query_kernel: Array | None  # (H, D, K); None if queries come from another sequence
    mask: Array | None  # (H, T, S)


def mix_by_compiler(
    heads: Heads, places: Array | None, order: int
) -> tuple[Array, Array, Array | None]:
    """Mean and variance (H, T, K), and own weights (H, T) or None.

    `places` are the positions of the queries' own tokens among the keys; None if they coincide.
    """
    variance = heads.shared.variance

    def mix_one(head: Any) -> tuple[Array, Array, Array | None]:
        parts, kernels, query_kernel, mask = head
        return _head(parts, Shared(variance, *kernels), query_kernel, mask, places, order)

    parts, kernels = heads[:3], heads.shared[1:]
    num_scores = heads.query.mean[..., 0].size * heads.key.mean.shape[1]
    return each_head(mix_one, (parts, kernels, heads.query_kernel, heads.mask), num_scores)


def _head(
    parts: tuple[Part, Part, Part],
    shared: Shared,
    query_kernel: Array | None,
    mask: Array | None,
    places: Array | None,
    order: int,
) -> tuple[Array, Array, Array | None]:
    """Mean (T, K), variance (T, K) and own weights (T,) of one head."""
    q, k, v = parts
    own = noise = own_weights = None
    if query_kernel is not None:
        own = Own(own_tokens(k.mean, places), own_tokens(shared.variance, places), query_kernel)
        if order == 2:
            noise = own.variance @ jnp.sum(query_kernel * shared.key_kernel, axis=1)
            noise = at_own(noise, places, k.mean.shape[0])
    mean, variance, mixing = mix(Rows(q, k, v, noise), mask, order)
    if query_kernel is not None:
        own_weights = own_entries(mixing.weights, places)
    if order == 2:
        assert mixing.gain is not None
        column = None if own_weights is None else own_weights[:, None]
        mean = mean + mixing.gain * shared_mean(q, k, shared, mixing.weights, own, column)
    return mean, variance, own_weights
