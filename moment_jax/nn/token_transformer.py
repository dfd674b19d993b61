"""`TokenTransformer`: a sequence of vectors in, moments of a vector at every token out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.nn.base import Composite, Stage
from moment_jax.nn.batching import check_sequences
from moment_jax.nn.conversion import set_mean
from moment_jax.nn.dense import Dense
from moment_jax.nn.embedding import LearnedPositions
from moment_jax.nn.encoder import Encoder
from moment_jax.nn.plain import PlainTokenTransformer

Array = jax.Array


class TokenTransformer(Composite):
    """Dense embedding + learned positions -> encoder -> dense head at every token.

    For one-hot inputs the embedding's kernel is a table of random rows.

    Args:
      num_tokens: T.
      in_features: numbers at every token of the input.
      out_features: numbers at every token of the output.
      num_blocks: L.
      num_features: D.
      num_heads: H, a divisor of D.
      norm_first: pre-norm if True.
      position_scale: initial sd of the positions' means. By default positions are as large as tokens:
        with Flax's customary 0.02 a small network is slow to tell positions apart.
      rngs: Flax random streams.
      options: the other keyword arguments of `Encoder`, including those of `Settings`.

    Raises:
      ValueError: if a size is below one, the heads do not divide the features, or the activation is
        unknown.
    """

    parts = ("embed", "positions", "encoder", "head")
    plain_type = PlainTokenTransformer

    def __init__(
        self,
        num_tokens: int,
        in_features: int,
        out_features: int,
        *,
        num_blocks: int = 1,
        num_features: int = 32,
        num_heads: int = 4,
        norm_first: bool = True,
        position_scale: float = 1.0,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.encoder = Encoder(
            num_blocks, num_features, num_heads, norm_first=norm_first, rngs=rngs, **options
        )
        self.settings = self.encoder.settings
        settings = dataclasses.asdict(self.settings)
        self.embed = Dense(in_features, num_features, rngs=rngs, **settings)
        self.positions = LearnedPositions(num_tokens, num_features, rngs=rngs, **settings)
        start = jax.random.normal(rngs.params(), (num_tokens, num_features), self.settings.dtype)
        set_mean(self.positions.embedding.table, position_scale * start)
        self.head = Dense(num_features, out_features, rngs=rngs, **settings)

    @property
    def stages(self) -> list[Stage]:
        """Embedding, positions, those of the encoder, and the head."""
        return [
            *(stage._replace(name="embedding") for stage in self.embed.stages),
            *(stage._replace(name="positions") for stage in self.positions.stages),
            *self.encoder.stages,
            *(stage._replace(name="head") for stage in self.head.stages),
        ]

    def __call__(self, mean: Array, cov: Covariance | None = None) -> tuple[Array, Covariance]:
        """Moments of the output: (..., T, in) -> (..., T, out); cov None where x is certain."""
        check_sequences(mean, cov)
        size = (self.positions.params.shape[0], self.embed.params.kernel.shape[0])
        if tuple(mean.shape[-2:]) != size:
            raise ValueError(
                f"`TokenTransformer` needs sequences of shape (..., T, in), (T, in) == {size}. Got "
                f"{tuple(mean.shape)}."
            )
        return self.head(*self.encoder(*self.positions(*self.embed(mean, cov))))
