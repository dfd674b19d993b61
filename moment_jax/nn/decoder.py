"""`Decoder`: a stack of Bayesian decoder blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.layers import DecoderBlockParams, NormParams, layer_norm
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.batching import over_batch_with_memory
from moment_jax.nn.decoder_block import DecoderBlock
from moment_jax.nn.dense import LayerNorm
from moment_jax.nn.plain import plain_norm
from moment_jax.nn.plain_decoder import PlainDecoder
from moment_jax.nn.settings import Settings
from moment_jax.nn.stack import through_blocks

Array = jax.Array


class Decoder(BayesianModule):
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
            raise ValueError(f"`Decoder` needs num_blocks >= 1. Got {num_blocks}.")
        self.settings = Settings(**settings)
        self.remat = remat
        self.blocks = nnx.List(
            DecoderBlock(
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
        cls, decoder: PlainDecoder, *, activation: str = "relu", **settings: Any
    ) -> Decoder:
        """Beliefs that start at the weights of a trained plain decoder with this activation."""
        first = decoder.blocks[0]
        new = cls(
            len(decoder.blocks),
            first.hidden.in_features,
            first.self_attention.num_heads,
            norm_first=first.norm_first,
            epsilon=first.norm1.epsilon,
            hidden_features=first.hidden.out_features,
            activation=activation,
            rngs=nnx.Rngs(0),
            **settings,
        )
        new.load(decoder)
        return new

    def load(self, decoder: PlainDecoder) -> None:
        """Take the weights of a plain decoder as means."""
        for mine, theirs in zip(self.blocks, decoder.blocks, strict=True):
            mine.load(theirs)
        if self.final_norm is not None and decoder.final_norm is not None:
            self.final_norm.load(decoder.final_norm)

    @property
    def params(self) -> tuple[list[DecoderBlockParams], NormParams | None]:
        """Beliefs about all blocks, and about the final normalisation."""
        final = None if self.final_norm is None else self.final_norm.params
        return [block.params for block in self.blocks], final

    def network(self, params: tuple[list[DecoderBlockParams], NormParams | None]) -> PlainDecoder:
        """The plain decoder with these arrays."""
        blocks, final = params
        features = blocks[0].self_attention.query.kernel.shape[0]
        return PlainDecoder(
            [block.network(arrays) for block, arrays in zip(self.blocks, blocks, strict=True)],
            None if final is None else plain_norm(final, features, self.epsilon),
        )

    def moments(
        self,
        mean: Array,
        cov: Covariance,
        memory_mean: Array,
        memory_cov: Covariance,
        params: tuple[list[DecoderBlockParams], NormParams | None],
        mask: Array | None,
        memory_mask: Array | None,
    ) -> tuple[Array, Covariance]:
        """Moments of one sequence (T, D) with one memory (S, D) and these beliefs."""
        blocks, final = params

        def step(block: DecoderBlock) -> Callable[..., Any]:
            def run(mean: Array, cov: Covariance, beliefs: DecoderBlockParams) -> Any:
                return block.moments(mean, cov, memory_mean, memory_cov, beliefs, mask, memory_mask)

            return jax.checkpoint(run) if self.remat else run

        mean, cov = through_blocks(self.blocks, step, blocks, mean, cov)
        if final is not None:
            mean, cov = layer_norm(mean, cov, final, epsilon=self.epsilon)
        return mean, cov

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
            lambda m, c, n, d: self.moments(m, c, n, d, params, mask, memory_mask),
            mean,
            cov,
            memory_mean,
            memory_cov,
            self.settings.structure,
        )
