"""`Decoder`: a stack of Bayesian decoder blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from moment_jax.covariance import Covariance
from moment_jax.layers import DecoderBlockParams, NormParams, layer_norm
from moment_jax.layers.attention.attend import make_source
from moment_jax.layers.attention.cache import empty_cache
from moment_jax.layers.cached_blocks import DecoderBlockCache
from moment_jax.layers.seen import look_at_valid, pool_seen
from moment_jax.nn.batching import over_batch, over_batch_with_memory
from moment_jax.nn.decoder_block import DecoderBlock
from moment_jax.nn.plain_decoder import PlainDecoder
from moment_jax.nn.stack import Stack, stack_caches, through_blocks

Array = jax.Array


class Decoder(Stack):
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

    def moments(
        self,
        mean: Array,
        cov: Covariance,
        memory_mean: Array,
        memory_cov: Covariance,
        params: tuple[list[DecoderBlockParams], NormParams | None],
        mask: Array | None,
        memory_mask: Array | None,
        valid: Array | None = None,
        memory_valid: Array | None = None,
    ) -> tuple[Array, Covariance]:
        """Moments of one sequence (T, D) with one memory (S, D) and these beliefs."""
        blocks, final = params
        mask = look_at_valid(mask, valid, mean.shape[0])
        memory_mask = look_at_valid(memory_mask, memory_valid, mean.shape[0])
        cov = pool_seen(cov, mask)
        memory_cov = pool_seen(memory_cov, memory_mask, memory=True)

        def step(block: DecoderBlock) -> Callable[..., Any]:
            def run(mean: Array, cov: Covariance, beliefs: DecoderBlockParams) -> Any:
                return block.moments(mean, cov, memory_mean, memory_cov, beliefs, mask, memory_mask)

            return jax.checkpoint(run) if self.remat else run

        mean, cov = through_blocks(self.blocks, step, blocks, mean, cov)
        if final is not None:
            mean, cov = layer_norm(mean, cov, final, epsilon=self.epsilon)
        return mean, cov

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

        def make(mean: Array, cov: Covariance, valid: Array | None = None) -> Any:
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

        return over_batch(make, memory_mean, memory_cov, structure, memory_valid)

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
        return over_batch_with_memory(
            lambda m, c, n, d, v, w: self.moments(m, c, n, d, params, mask, memory_mask, v, w),
            mean,
            cov,
            memory_mean,
            memory_cov,
            self.settings.structure,
            valid,
            memory_valid,
        )
