"""Attention for `Diagonal`: one head at a time, or all in a kernel; see `diagonal_rows`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from moment_jax.covariance import Diagonal
from moment_jax.layers.attention.diagonal_kernel import Heads, find_plan, mix_by_kernel
from moment_jax.layers.attention.diagonal_rows import Own, Part, Rows, Shared, shared_mean
from moment_jax.layers.attention.each_head import each_head
from moment_jax.layers.attention.inputs import (
    Inputs,
    Mixing,
    Projection,
    merge_heads,
    split_heads,
)
from moment_jax.layers.attention.mix import mix
from moment_jax.layers.attention.places import at_own, own_entries, own_tokens

Array = jax.Array


def mix_diagonal(inputs: Inputs[Diagonal]) -> tuple[Array, Diagonal, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), variance, and own weights (H, T)."""
    heads, places = _heads(inputs), inputs.shared.places
    plan = None if places is not None else find_plan(heads, inputs.order)
    if plan is None:
        mean, variance, own_weights = _mix(heads, places, inputs.order)
    else:
        mean, variance, own_weights = mix_by_kernel(plan, heads)
    return merge_heads(mean), Diagonal(merge_heads(variance)), Mixing(None, own=own_weights)


def _heads(inputs: Inputs[Diagonal]) -> Heads:
    h, shared = inputs.num_heads, inputs.shared
    kernels = (split_heads(kernel, h) for kernel in (shared.key_kernel, shared.value_kernel))
    return Heads(
        _part(inputs.query, h),
        _part(inputs.key, h),
        _part(inputs.value, h),
        Shared(shared.cov.variances, *kernels),
        None if shared.query_kernel is None else split_heads(shared.query_kernel, h),
        inputs.mask,
    )


def _part(projection: Projection[Diagonal], num_heads: int) -> Part:
    return Part(
        split_heads(projection.mean, num_heads), split_heads(projection.cov.variances, num_heads)
    )


def _mix(heads: Heads, places: Array | None, order: int) -> tuple[Array, Array, Array | None]:
    """Mean and variance (H, T, K), own weights (H, T) or None, by the compiler's own program."""
    variance = heads.shared.variance

    def mix(head: Any) -> tuple[Array, Array, Array | None]:
        parts, kernels, query_kernel, mask = head
        return _head(parts, Shared(variance, *kernels), query_kernel, mask, places, order)

    parts, kernels = heads[:3], heads.shared[1:]
    num_scores = heads.query.mean[..., 0].size * heads.key.mean.shape[1]
    return each_head(mix, (parts, kernels, heads.query_kernel, heads.mask), num_scores)


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
