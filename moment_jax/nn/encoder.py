"""`Encoder`: a stack of Bayesian encoder blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.layers import (
    EncoderBlockParams,
    NormParams,
    layer_norm,
)
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.batching import over_batch
from moment_jax.nn.dense import LayerNorm
from moment_jax.nn.encoder_block import EncoderBlock
from moment_jax.nn.plain import PlainEncoder, plain_norm
from moment_jax.nn.settings import Settings
from moment_jax.nn.stack import through_blocks
from moment_jax.reference import Stage

Array = jax.Array


class Encoder(BayesianModule):
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

    def __init__(
        self,
        num_blocks: int,
        num_features: int,
        num_heads: int,
        *,
        norm_first: bool = False,
        epsilon: float = 1e-6,
        rngs: nnx.Rngs,
        hidden_features: int | None = None,
        activation: str = "relu",
        remat: bool = False,
        **settings: Any,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"`Encoder` needs num_blocks >= 1. Got {num_blocks}.")
        self.settings = Settings(**settings)
        self.remat = remat
        self.blocks = nnx.List(
            EncoderBlock(
                num_features,
                num_heads,
                hidden_features=hidden_features,
                norm_first=norm_first,
                activation=activation,
                epsilon=epsilon,
                rngs=rngs,
                **settings,
            )
            for _ in range(num_blocks)
        )
        self.epsilon = epsilon
        self.final_norm = nnx.data(
            LayerNorm(num_features, epsilon=epsilon, **settings) if norm_first else None
        )

    @classmethod
    def from_deterministic(
        cls, encoder: PlainEncoder, *, activation: str = "relu", **settings: Any
    ) -> Encoder:
        """Beliefs that start at the weights of a trained plain encoder with this activation."""
        first = encoder.blocks[0]
        new = cls(
            len(encoder.blocks),
            first.hidden.in_features,
            first.attention.num_heads,
            norm_first=first.norm_first,
            epsilon=first.norm1.epsilon,
            hidden_features=first.hidden.out_features,
            activation=activation,
            rngs=nnx.Rngs(0),
            **settings,
        )
        new.load(encoder)
        return new

    def load(self, encoder: PlainEncoder) -> None:
        """Take the weights of a plain encoder as means."""
        for mine, theirs in zip(self.blocks, encoder.blocks, strict=True):
            mine.load(theirs)
        if self.final_norm is not None and encoder.final_norm is not None:
            self.final_norm.load(encoder.final_norm)

    @property
    def params(self) -> tuple[list[EncoderBlockParams], NormParams | None]:
        """Beliefs about all blocks, and about the final normalisation."""
        final = None if self.final_norm is None else self.final_norm.params
        return [block.params for block in self.blocks], final

    def network(self, params: tuple[list[EncoderBlockParams], NormParams | None]) -> PlainEncoder:
        """The plain encoder with these arrays."""
        blocks, final = params
        features = blocks[0].attention.query.kernel.shape[0]
        return PlainEncoder(
            [block.network(arrays) for block, arrays in zip(self.blocks, blocks, strict=True)],
            None if final is None else plain_norm(final, features, self.epsilon),
        )

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
        self, mean: Array, cov: Covariance, params: Any, mask: Array | None
    ) -> tuple[Array, Covariance]:
        """Moments of one sequence (T, D) with these beliefs."""
        blocks, final = params
        mean, cov = through_blocks(
            self.blocks, lambda block: self._step(block, mask), blocks, mean, cov
        )
        if final is not None:
            mean, cov = layer_norm(mean, cov, final, epsilon=self.epsilon)
        return mean, cov

    def __call__(
        self, mean: Array, cov: Covariance | None = None, mask: Array | None = None
    ) -> tuple[Array, Covariance]:
        """Moments of the output, (..., T, D); mask (T, T) or (H, T, T), the same for the batch."""
        params = self.params
        return over_batch(
            lambda m, c: self.moments(m, c, params, mask), mean, cov, self.settings.structure
        )
