"""`EncoderBlock`: attention and feed-forward layer with beliefs about all their weights."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.layers import (
    EncoderBlockParams,
    FeedForwardParams,
    encoder_block,
)
from moment_jax.layers.cached_blocks import encoder_block_step
from moment_jax.layers.sublayers import (
    Normalization,
    attention_sublayer,
    feed_forward_sublayer,
)
from moment_jax.nn.activations import find_activation
from moment_jax.nn.attention import MultiHeadAttention
from moment_jax.nn.base import Stage
from moment_jax.nn.batching import over_batch
from moment_jax.nn.block import Block
from moment_jax.nn.plain import PlainEncoderBlock
from moment_jax.posterior import sample_params

Array = jax.Array


class EncoderBlock(Block):
    """A Transformer encoder block with beliefs about all its weights.

    Args:
      num_features: D.
      num_heads: H, a divisor of D.
      hidden_features: width of the feed-forward layer; 4 D where None.
      norm_first: pre-norm if True, post-norm (the derivation's) if False.
      activation: "relu", "gelu", "tanh" or "silu".
      epsilon: added to the variance in the normalisations.
      rngs: Flax random streams.
      settings: keyword arguments of `Settings`.

    Raises:
      ValueError: if the heads do not divide the features, or the activation is unknown.
    """

    parts = ("attention", "norm1", "hidden", "output", "norm2")
    plain_type = PlainEncoderBlock
    step_moments = staticmethod(encoder_block_step)

    def make_attention(self, num_features: int, rngs: nnx.Rngs, settings: dict[str, Any]) -> None:
        """Self-attention."""
        self.attention = MultiHeadAttention(num_features, self.num_heads, rngs=rngs, **settings)

    @property
    def params(self) -> EncoderBlockParams:
        """Beliefs about all sublayers."""
        return EncoderBlockParams(
            self.attention.params,
            self.norm1.params,
            FeedForwardParams(self.hidden.params, self.output.params),
            self.norm2.params,
        )

    @property
    def stages(self) -> list[Stage]:
        """Attention and feed-forward, each with its residual and its normalisation."""
        params, norm = self.params, Normalization(self.norm_first, self.epsilon)
        activation = find_activation(self.activation).moments

        def attend(mean: Array, cov: Covariance) -> tuple[Array, Covariance]:
            return attention_sublayer(
                mean, cov, params.attention, params.norm1, norm, num_heads=self.num_heads
            )

        def transform(mean: Array, cov: Covariance) -> tuple[Array, Covariance]:
            return feed_forward_sublayer(
                mean, cov, params.feed_forward, params.norm2, norm, activation=activation
            )

        return [
            Stage("attention", attend, lambda key, x: self._drawn(key).attend(x)),
            Stage("feed-forward", transform, lambda key, x: self._drawn(key).feed_forward(x)),
        ]

    def _drawn(self, key: Array) -> PlainEncoderBlock:
        return self.network(sample_params(self.params, key))

    def moments(
        self, mean: Array, cov: Covariance, params: EncoderBlockParams, mask: Array | None
    ) -> tuple[Array, Covariance]:
        """Moments of one sequence (T, D) with these beliefs."""
        return encoder_block(mean, cov, params, mask=mask, **self.options)

    def __call__(
        self, mean: Array, cov: Covariance | None = None, mask: Array | None = None
    ) -> tuple[Array, Covariance]:
        """Moments of the output, (..., T, D); mask (T, T) or (H, T, T), the same for the batch."""
        params = self.params
        return over_batch(
            lambda m, c: self.moments(m, c, params, mask), mean, cov, self.settings.structure
        )
