"""One decoding step of a block: the newest tokens of a causal sequence, with earlier ones cached."""

from functools import partial
from typing import Any, NamedTuple, TypeVar

from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.layers.attention.attend import View, attend
from moment_jax.layers.attention.cache import KeyValueCache, attention_step
from moment_jax.layers.attention.inputs import Source
from moment_jax.layers.blocks import Normalization, feed_forward_of, sublayer
from moment_jax.layers.checks import check_moments
from moment_jax.layers.feed_forward import Activation, relu
from moment_jax.layers.params import (
    AttentionParams,
    DecoderBlockParams,
    EncoderBlockParams,
    NormParams,
)
from moment_jax.layers.residual import Tangent
from moment_jax.layers.seen import look_at_valid
from moment_jax.xla import materialized_inputs

S = TypeVar("S", bound=Covariance)


class DecoderBlockCache(NamedTuple):
    """A decoder block's cache: its own tokens so far, and the memory's keys and values."""

    tokens: KeyValueCache
    memory: Source[Any]
    memory_valid: Array | None  # (S,) boolean, True for tokens that exist; None for all


@materialized_inputs
def encoder_block_step(
    mean: Array,
    cov: S,
    cache: KeyValueCache,
    params: EncoderBlockParams,
    *,
    num_heads: int,
    norm_first: bool = False,
    activation: Activation = relu,
    epsilon: float = 1e-6,
    order: int = 2,
) -> tuple[Array, S, KeyValueCache]:
    """`encoder_block` with a causal mask, for the newest tokens (N, D) only.

    `cov` must be a structure with independent tokens; `cache` holds the tokens before these. The other
    arguments are those of `encoder_block`. Returns mean (N, D) and covariance of the output, and the
    extended cache.
    """
    check_moments("encoder_block_step", mean, cov)
    norm = Normalization(norm_first, epsilon, order)
    mean, cov, cache = _attention_step_sublayer(
        mean, cov, cache, params.attention, params.norm1, norm, num_heads=num_heads
    )

    mean, cov = sublayer(
        mean, cov, feed_forward_of(params.feed_forward, activation), params.norm2, norm
    )
    return mean, cov, cache


@materialized_inputs
def decoder_block_step(
    mean: Array,
    cov: S,
    cache: DecoderBlockCache,
    params: DecoderBlockParams,
    *,
    num_heads: int,
    norm_first: bool = False,
    activation: Activation = relu,
    epsilon: float = 1e-6,
    order: int = 2,
) -> tuple[Array, S, DecoderBlockCache]:
    """`decoder_block` with a causal mask for the newest tokens (N, D): see `encoder_block_step`."""
    check_moments("decoder_block_step", mean, cov)
    norm = Normalization(norm_first, epsilon, order)
    mean, cov, tokens = _attention_step_sublayer(
        mean, cov, cache.tokens, params.self_attention, params.norm1, norm, num_heads=num_heads
    )
    mask = look_at_valid(None, cache.memory_valid)
    view = View(num_heads, mask, order, own=False)

    look = partial(attend, source=cache.memory, params=params.cross_attention, view=view)
    mean, cov = sublayer(mean, cov, look, params.norm2, norm)
    mean, cov = sublayer(
        mean, cov, feed_forward_of(params.feed_forward, activation), params.norm3, norm
    )
    return mean, cov, cache._replace(tokens=tokens)


def _attention_step_sublayer(
    mean: Array,
    cov: S,
    cache: KeyValueCache,
    params: AttentionParams,
    norm_params: NormParams,
    norm: Normalization,
    *,
    num_heads: int,
) -> tuple[Array, S, KeyValueCache]:
    """Causal self-attention of the newest tokens to cached ones, and the extended cache."""
    caches = [cache]

    def branch(mean: Array, cov: S) -> tuple[Array, S, Tangent]:
        mean, cov, tangent, cache = attention_step(
            mean, cov, caches[0], params, num_heads=num_heads, order=norm.order
        )
        caches.append(cache)
        return mean, cov, tangent

    mean, cov = sublayer(mean, cov, branch, norm_params, norm)
    return mean, cov, caches[-1]
