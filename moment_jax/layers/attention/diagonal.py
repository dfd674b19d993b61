"""Attention for `Diagonal`: plain JAX or a Pallas kernel."""

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Diagonal
from moment_jax.layers.attention.diagonal_heads import Heads, mix_by_compiler
from moment_jax.layers.attention.diagonal_kernel import find_plan, mix_by_kernel
from moment_jax.layers.attention.diagonal_rows import Part, Shared
from moment_jax.layers.attention.inputs import (
    Inputs,
    Mixing,
    Projection,
    merge_heads,
    split_heads,
)
from moment_jax.layers.attention.places import own_tokens


def mix_diagonal(inputs: Inputs[Diagonal]) -> tuple[Array, Diagonal, Mixing]:
    """Moments of the concatenated heads: mean (T, H K), variance, and own weights (H, T)."""
    heads, places = _heads(inputs), inputs.shared.places
    plan = None if places is not None else find_plan(heads, inputs.order)
    if plan is None:
        mean, variance, own_weights = mix_by_compiler(heads, places, inputs.order)
    else:
        mean, variance, own_weights = mix_by_kernel(plan, heads)
    return merge_heads(mean), Diagonal(merge_heads(variance)), Mixing(None, own=own_weights)


def _heads(inputs: Inputs[Diagonal]) -> Heads:
    h, shared, noise = inputs.num_heads, inputs.shared, None
    key, value = (split_heads(kernel, h) for kernel in (shared.key_kernel, shared.value_kernel))
    variance = shared.cov.variances
    if shared.query_kernel is not None:
        linked = jnp.sum(split_heads(shared.query_kernel, h) * key, axis=2)  # (H, D)
        noise = (own_tokens(variance, shared.places) @ linked.T).T[:, :, None]
    return Heads(
        _part(inputs.query, h),
        _part(inputs.key, h),
        _part(inputs.value, h),
        Shared(jnp.mean(variance, axis=1)[None, :], jnp.swapaxes(key, 1, 2) @ value),
        noise,
        inputs.mask,
    )


def _part(projection: Projection[Diagonal], num_heads: int) -> Part:
    return Part(
        split_heads(projection.mean, num_heads), split_heads(projection.cov.variances, num_heads)
    )
