"""`DecoderBlock`, self-attention, attention to a memory and feed-forward layer; `Decoder`, a stack."""

from __future__ import annotations

import abc
from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.layers import DecoderBlockParams, FeedForwardParams, decoder_block
from moment_jax.layers.attention.attend import make_source
from moment_jax.layers.attention.cache import empty_cache
from moment_jax.layers.cached_blocks import DecoderBlockCache, decoder_block_step
from moment_jax.layers.seen import look_at_valid, pool_seen
from moment_jax.nn.attention import MultiHeadAttention
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.block import Block
from moment_jax.nn.dense import LayerNorm
from moment_jax.nn.plain import PlainDecoder, PlainDecoderBlock
from moment_jax.nn.stack import Stack, stack_caches

Array = jax.Array
Moments = tuple[Array, Covariance]
Masks = tuple[Array | None, Array | None]  # of the sequence, and of the memory


class WithMemory(BayesianModule):
    """A module that looks at a memory; subclasses give `masked_moments`."""

    @abc.abstractmethod
    def masked_moments(self, x: Moments, memory: Moments, params: Any, masks: Masks) -> Moments:
        """Moments of one sequence with one memory; the masks say which tokens exist, too."""

    def moments(
        self,
        mean: Array,
        cov: Covariance,
        memory_mean: Array,
        memory_cov: Covariance,
        params: Any,
        mask: Array | None,
        memory_mask: Array | None,
        valid: Array | None = None,
        memory_valid: Array | None = None,
    ) -> Moments:
        """Moments of one sequence (T, D) with one memory (S, D) and these beliefs."""
        masks = (
            look_at_valid(mask, valid),
            look_at_valid(memory_mask, memory_valid),
        )
        return self.masked_moments((mean, cov), (memory_mean, memory_cov), params, masks)

    def __call__(
        self,
        mean: Array,
        memory_mean: Array,
        cov: Covariance | None = None,
        memory_cov: Covariance | None = None,
        mask: Array | None = None,
        memory_mask: Array | None = None,
        valid: Array | None = None,
        memory_valid: Array | None = None,
    ) -> tuple[Array, Covariance]:
        """Moments of the output, (..., T, D), with a memory (..., S, D).

        Masks are as `decoder_block`'s, the same for the batch; `valid` (..., T) and `memory_valid`
        (..., S) are True for tokens that exist and False for padding.
        """
        params = self.params
        return self._over_batch(
            lambda m, c, v, n, d, w: self.moments(m, c, n, d, params, mask, memory_mask, v, w),
            (mean, cov, valid),
            (memory_mean, memory_cov, memory_valid),
        )


class DecoderBlock(WithMemory, Block):
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

    def masked_moments(self, x: Moments, memory: Moments, params: Any, masks: Masks) -> Moments:
        """See `WithMemory`."""
        mask, memory_mask = masks
        options = {"mask": mask, "memory_mask": memory_mask, **self.options}
        return decoder_block(*x, *memory, params, **options)


class Decoder(WithMemory, Stack):
    """A stack of decoder blocks that look at one memory; with pre-norm, a final normalisation follows.

    Assumes that the sequence and the memory are independent, in every block: see `mj.decoder_block`.

    Args:
      num_blocks: L.
      num_features: D.
      num_heads: H, a divisor of D.
      norm_first: pre-norm if True.
      remat: as for `Encoder`.
      rngs: Flax random streams.
      options: the other keyword arguments of `DecoderBlock`, those of `Settings` among them.
    """

    block_type = DecoderBlock
    plain_type = PlainDecoder

    def masked_moments(self, x: Moments, memory: Moments, params: Any, masks: Masks) -> Moments:
        """See `WithMemory`."""
        memory = memory[0], pool_seen(memory[1], masks[1], memory=True)

        def step(block: DecoderBlock, mean: Array, cov: Covariance, beliefs: Any) -> Moments:
            return block.masked_moments((mean, cov), memory, beliefs, masks)

        return self._through(step, x[0], pool_seen(x[1], masks[0]), params)

    def start(
        self,
        max_length: int,
        memory_mean: Array,
        memory_cov: Covariance | None = None,
        memory_valid: Array | None = None,
    ) -> DecoderBlockCache:
        """A cache for causal sequences of up to `max_length` tokens that look at a memory (..., S, D).

        Keys and values of the memory are computed here, once.

        Raises:
          ValueError: if there is no room for a token. TypeError: if the structure correlates tokens.
        """
        blocks, structure = self.params[0], self.settings.structure

        def make(mean: Array, cov: Covariance, valid: Array | None) -> Any:
            return stack_caches(
                [
                    DecoderBlockCache(
                        empty_cache(max_length, own.self_attention, structure, mean.dtype),
                        make_source(mean, cov, own.cross_attention),
                        valid,
                    )
                    for own in blocks
                ]
            )

        return self._over_batch(make, (memory_mean, memory_cov, memory_valid))
