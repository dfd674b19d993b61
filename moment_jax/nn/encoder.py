"""`Encoder`: a stack of Bayesian encoder blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from moment_jax.covariance import Covariance
from moment_jax.layers import (
    EncoderBlockParams,
    layer_norm,
)
from moment_jax.layers.attention.cache import KeyValueCache, empty_cache
from moment_jax.layers.seen import look_at_valid, pool_seen
from moment_jax.nn.base import Stage
from moment_jax.nn.batching import over_batch
from moment_jax.nn.encoder_block import EncoderBlock
from moment_jax.nn.plain import PlainEncoder
from moment_jax.nn.stack import Stack, stack_caches, through_blocks

Array = jax.Array


class Encoder(Stack):
    """A stack of encoder blocks; with pre-norm, a final normalisation follows.

    Args:
      num_blocks: L.
      num_features: D.
      num_heads: H, a divisor of D.
      norm_first: pre-norm if True.
      remat: compute every block's moments anew in the backward pass, in the place of keeping them:
        memory does not grow with L but for the blocks' inputs, a train step takes about a third longer.
      rngs: Flax random streams.
      options: the other keyword arguments of `EncoderBlock`, those of `Settings` among them.
    """

    block_type = EncoderBlock
    plain_type = PlainEncoder

    @property
    def stages(self) -> list[Stage]:
        """Those of the blocks, and the final normalisation."""
        stages = [
            stage._replace(name=f"block {i} {stage.name}")
            for i, block in enumerate(self.blocks)
            for stage in block.stages
        ]
        if self.final_norm is not None:
            stages += [stage._replace(name="final norm") for stage in self.final_norm.stages]
        return stages

    def _step(self, block: EncoderBlock, mask: Array | None) -> Callable[..., Any]:
        def step(mean: Array, cov: Covariance, beliefs: EncoderBlockParams) -> Any:
            return block.moments(mean, cov, beliefs, mask)

        return jax.checkpoint(step) if self.remat else step

    def moments(
        self,
        mean: Array,
        cov: Covariance,
        params: Any,
        mask: Array | None,
        valid: Array | None = None,
    ) -> tuple[Array, Covariance]:
        """Moments of one sequence (T, D) with these beliefs."""
        blocks, final = params
        mask = look_at_valid(mask, valid, mean.shape[0])
        cov = pool_seen(cov, mask)
        mean, cov = through_blocks(
            self.blocks, lambda block: self._step(block, mask), blocks, mean, cov
        )
        if final is not None:
            mean, cov = layer_norm(mean, cov, final, epsilon=self.epsilon)
        return mean, cov

    def start(self, max_length: int, batch: tuple[int, ...] = ()) -> KeyValueCache:
        """An empty cache for causal sequences of up to `max_length` tokens, with these leading axes.

        Raises:
          ValueError: if there is no room for a token. TypeError: if the structure correlates tokens.
        """
        settings = self.settings
        caches = [
            empty_cache(max_length, own.attention, settings.structure, settings.dtype)
            for own in self.params[0]
        ]
        return stack_caches(caches, batch)

    def __call__(
        self,
        mean: Array,
        cov: Covariance | None = None,
        mask: Array | None = None,
        valid: Array | None = None,
    ) -> tuple[Array, Covariance]:
        """Moments of the output.

        Args:
          mean: of the input, (..., T, D).
          cov: covariance with the same leading axes; None where the input is certain.
          mask: (T, T) or (H, T, T) boolean, True where a query may look, the same for the batch.
          valid: (..., T) boolean, True for tokens that exist and False for padding; None for all. The
            moments of those that exist are what they would be without padding.

        Returns:
          Mean (..., T, D) and covariance.
        """
        params = self.params
        return over_batch(
            lambda m, c, *v: self.moments(m, c, params, mask, *v),
            mean,
            cov,
            self.settings.structure,
            valid,
        )
