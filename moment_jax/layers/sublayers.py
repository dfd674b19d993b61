"""A sublayer of a Transformer block: a branch with its residual and its normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax

from moment_jax.covariance import Covariance
from moment_jax.layers.attention.cache import KeyValueCache, attention_step
from moment_jax.layers.attention.multi_head import Memory, attention_and_tangent
from moment_jax.layers.feed_forward import Activation, feed_forward_and_tangent
from moment_jax.layers.norm import layer_norm, layer_norm_and_tangent
from moment_jax.layers.norm_tangent import NormTangent
from moment_jax.layers.params import AttentionParams, FeedForwardParams, NormParams
from moment_jax.layers.residual import Tangent, residual

Array = jax.Array
S = TypeVar("S", bound=Covariance)


class Normalization(NamedTuple):
    """Where a sublayer normalises, and how; see `encoder_block`."""

    first: bool
    epsilon: float
    order: int = 2


def attention_sublayer(
    mean: Array,
    cov: S,
    params: AttentionParams,
    norm_params: NormParams,
    norm: Normalization,
    *,
    num_heads: int,
    mask: Array | None = None,
    memory: Memory | None = None,
) -> tuple[Array, S]:
    """Attention, to a memory where there is one, with its residual and its normalisation."""

    def branch(mean: Array, cov: S) -> tuple[Array, S, Tangent]:
        return attention_and_tangent(
            mean, cov, params, num_heads=num_heads, mask=mask, order=norm.order, memory=memory
        )

    return sublayer(mean, cov, branch, norm_params, norm)


def feed_forward_sublayer(
    mean: Array,
    cov: S,
    params: FeedForwardParams,
    norm_params: NormParams,
    norm: Normalization,
    *,
    activation: Activation,
) -> tuple[Array, S]:
    """The feed-forward layer with its residual and its normalisation."""

    def branch(mean: Array, cov: S) -> tuple[Array, S, Tangent]:
        return feed_forward_and_tangent(mean, cov, params, activation)

    return sublayer(mean, cov, branch, norm_params, norm)


def attention_step_sublayer(
    mean: Array,
    cov: S,
    cache: KeyValueCache,
    params: AttentionParams,
    norm_params: NormParams,
    norm: Normalization,
    *,
    num_heads: int,
) -> tuple[Array, S, KeyValueCache]:
    """Causal self-attention of the newest tokens to cached ones, and what is cached then."""
    inner, inner_cov, carried = _before(mean, cov, norm_params, norm)
    out_mean, out_cov, tangent, cache = attention_step(
        inner, inner_cov, cache, params, num_heads=num_heads, order=norm.order
    )
    mean, cov = _after(mean, cov, (out_mean, out_cov, tangent), carried, norm_params, norm)
    return mean, cov, cache


def sublayer(
    mean: Array,
    cov: S,
    branch: Callable[[Array, S], tuple[Array, S, Tangent]],
    params: NormParams,
    norm: Normalization,
) -> tuple[Array, S]:
    """X + branch(norm(x)), or norm(x + branch(x))."""
    inner, inner_cov, carried = _before(mean, cov, params, norm)
    return _after(mean, cov, branch(inner, inner_cov), carried, params, norm)


def _before(
    mean: Array, cov: S, params: NormParams, norm: Normalization
) -> tuple[Array, S, NormTangent | None]:
    """What the branch takes: the normalised array with pre-norm, the array itself with post-norm."""
    if norm.first:
        return layer_norm_and_tangent(mean, cov, params, norm.epsilon, norm.order)
    return mean, cov, None


def _after(
    mean: Array,
    cov: S,
    branch: tuple[Array, S, Tangent],
    carried: NormTangent | None,
    params: NormParams,
    norm: Normalization,
) -> tuple[Array, S]:
    """The residual sum, normalised with post-norm."""
    mean, cov = residual(mean, cov, *branch, carried)
    if norm.first:
        return mean, cov
    return layer_norm(mean, cov, params, epsilon=norm.epsilon, order=norm.order)
