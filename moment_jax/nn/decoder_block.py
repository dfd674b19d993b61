"""`DecoderBlock`: self-attention, attention to a memory and feed-forward layer, all weights random."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.layers import DecoderBlockParams, FeedForwardParams, decoder_block
from moment_jax.layers.cached_blocks import decoder_block_step
from moment_jax.nn.attention import MultiHeadAttention
from moment_jax.nn.batching import over_batch_with_memory
from moment_jax.nn.block import Block
from moment_jax.nn.dense import LayerNorm
from moment_jax.nn.plain_decoder import PlainDecoderBlock

Array = jax.Array


class DecoderBlock(Block):
    """A Transformer decoder block with beliefs about all its weights.

    Arguments and errors are those of `EncoderBlock`; D is the width of the memory too.
    """

    parts = ("self_attention", "norm1", "cross_attention", "norm2", "hidden", "output", "norm3")
    plain_type = PlainDecoderBlock
    step_moments = staticmethod(decoder_block_step)

    def make_attention(self, num_features: int, rngs: nnx.Rngs, settings: dict[str, Any]) -> None:
        """Self-attention, attention to the memory, and the third normalisation."""
        size = (num_features, self.num_heads)
        self.self_attention = MultiHeadAttention(*size, rngs=rngs, **settings)
        self.cross_attention = MultiHeadAttention(*size, rngs=rngs, **settings)
        self.norm3 = LayerNorm(num_features, epsilon=self.epsilon, **settings)

    @property
    def params(self) -> DecoderBlockParams:
        """Beliefs about all sublayers."""
        return DecoderBlockParams(
            self.self_attention.params,
            self.norm1.params,
            self.cross_attention.params,
            self.norm2.params,
            FeedForwardParams(self.hidden.params, self.output.params),
            self.norm3.params,
        )

    def moments(
        self,
        mean: Array,
        cov: Covariance,
        memory_mean: Array,
        memory_cov: Covariance,
        params: DecoderBlockParams,
        mask: Array | None,
        memory_mask: Array | None,
    ) -> tuple[Array, Covariance]:
        """Moments of one sequence (T, D) with one memory (S, D) and these beliefs."""
        return decoder_block(
            mean,
            cov,
            memory_mean,
            memory_cov,
            params,
            mask=mask,
            memory_mask=memory_mask,
            **self.options,
        )

    def __call__(
        self,
        mean: Array,
        memory_mean: Array,
        cov: Covariance | None = None,
        memory_cov: Covariance | None = None,
        mask: Array | None = None,
        memory_mask: Array | None = None,
    ) -> tuple[Array, Covariance]:
        """Moments of the output, (..., T, D), with a memory (..., S, D); masks as `decoder_block`'s."""
        params = self.params
        return over_batch_with_memory(
            lambda m, c, n, d, *_: self.moments(m, c, n, d, params, mask, memory_mask),
            mean,
            cov,
            memory_mean,
            memory_cov,
            self.settings.structure,
        )
