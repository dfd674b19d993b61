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
from moment_jax.layers.blocks import (
    Normalization,
    attention_sublayer,
    feed_forward_sublayer,
)
from moment_jax.nn.activations import find_activation
from moment_jax.nn.attention import MultiHeadAttention
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.batching import over_batch
from moment_jax.nn.dense import Dense, LayerNorm
from moment_jax.nn.plain import PlainEncoderBlock
from moment_jax.nn.settings import Settings
from moment_jax.reference import Stage, sample_params

Array = jax.Array


class EncoderBlock(BayesianModule):
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

    def __init__(
        self,
        num_features: int,
        num_heads: int,
        *,
        hidden_features: int | None = None,
        norm_first: bool = False,
        activation: str = "relu",
        epsilon: float = 1e-6,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        self.settings = Settings(**settings)
        self.num_heads = num_heads
        self.norm_first = norm_first
        self.activation = activation
        find_activation(activation)
        self.epsilon = epsilon
        hidden = 4 * num_features if hidden_features is None else hidden_features
        self.attention = MultiHeadAttention(num_features, num_heads, rngs=rngs, **settings)
        self.norm1 = LayerNorm(num_features, epsilon=epsilon, **settings)
        self.hidden = Dense(num_features, hidden, rngs=rngs, **settings)
        self.output = Dense(hidden, num_features, rngs=rngs, **settings)
        self.norm2 = LayerNorm(num_features, epsilon=epsilon, **settings)

    @classmethod
    def from_deterministic(
        cls, block: PlainEncoderBlock, *, activation: str = "relu", **settings: Any
    ) -> EncoderBlock:
        """Beliefs that start at the weights of a trained plain block with this activation."""
        new = cls(
            block.hidden.in_features,
            block.attention.num_heads,
            hidden_features=block.hidden.out_features,
            norm_first=block.norm_first,
            activation=activation,
            epsilon=block.norm1.epsilon,
            rngs=nnx.Rngs(0),
            **settings,
        )
        new.load(block)
        return new

    def load(self, block: PlainEncoderBlock) -> None:
        """Take the weights of a plain block as means."""
        for name in ("attention", "norm1", "hidden", "output", "norm2"):
            getattr(self, name).load(getattr(block, name))

    @property
    def params(self) -> EncoderBlockParams:
        """Beliefs about all sublayers."""
        return EncoderBlockParams(
            self.attention.params,
            self.norm1.params,
            FeedForwardParams(self.hidden.params, self.output.params),
            self.norm2.params,
        )

    def network(self, params: EncoderBlockParams) -> PlainEncoderBlock:
        """The plain block with these arrays."""
        return PlainEncoderBlock(
            params,
            num_heads=self.num_heads,
            norm_first=self.norm_first,
            activation=find_activation(self.activation).plain,
            epsilon=self.epsilon,
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
        return encoder_block(
            mean,
            cov,
            params,
            num_heads=self.num_heads,
            norm_first=self.norm_first,
            activation=find_activation(self.activation).moments,
            mask=mask,
            epsilon=self.epsilon,
        )

    def __call__(
        self, mean: Array, cov: Covariance | None = None, mask: Array | None = None
    ) -> tuple[Array, Covariance]:
        """Moments of the output, (..., T, D); mask (T, T) or (H, T, T), the same for the batch."""
        params = self.params
        return over_batch(
            lambda m, c: self.moments(m, c, params, mask), mean, cov, self.settings.structure
        )
