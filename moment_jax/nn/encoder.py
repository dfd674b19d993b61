"""`MultiHeadAttention`, `EncoderBlock` and `Encoder`: the Bayesian Transformer encoder."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.layers import (
    AttentionParams,
    EncoderBlockParams,
    FeedForwardParams,
    NormParams,
    attention,
    encoder_block,
    layer_norm,
)
from moment_jax.layers.blocks import (
    Normalization,
    attention_sublayer,
    feed_forward_sublayer,
)
from moment_jax.layers.checks import check_heads
from moment_jax.nn.activations import find_activation
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.batching import over_batch
from moment_jax.nn.dense import Dense, LayerNorm
from moment_jax.nn.plain import PlainEncoder, PlainEncoderBlock, plain_attention, plain_norm
from moment_jax.nn.settings import Settings
from moment_jax.reference import Stage, sample_params

Array = jax.Array


class MultiHeadAttention(BayesianModule):
    """Multi-head self-attention with beliefs about its four matrices.

    Args:
      num_features: D.
      num_heads: H, a divisor of D.
      use_bias: whether the four projections have biases.
      rngs: Flax random streams.
      settings: keyword arguments of `Settings`.

    Raises:
      ValueError: if the heads do not divide the features.
    """

    def __init__(
        self,
        num_features: int,
        num_heads: int,
        *,
        use_bias: bool = True,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        check_heads("MultiHeadAttention", num_heads, num_features)
        self.settings = Settings(**settings)
        self.num_heads = num_heads
        size = (num_features, num_features)
        self.query = Dense(*size, use_bias=use_bias, rngs=rngs, **settings)
        self.key = Dense(*size, use_bias=use_bias, rngs=rngs, **settings)
        self.value = Dense(*size, use_bias=use_bias, rngs=rngs, **settings)
        self.out = Dense(*size, use_bias=use_bias, rngs=rngs, **settings)

    @classmethod
    def from_deterministic(
        cls, layer: nnx.MultiHeadAttention, **settings: Any
    ) -> MultiHeadAttention:
        """Beliefs that start at the weights of a trained `nnx.MultiHeadAttention`."""
        new = cls(
            layer.in_features,
            layer.num_heads,
            use_bias=layer.query.bias is not None,
            rngs=nnx.Rngs(0),
            **settings,
        )
        new.load(layer)
        return new

    def load(self, layer: nnx.MultiHeadAttention) -> None:
        """Take the weights of an `nnx.MultiHeadAttention` as means."""
        for name in ("query", "key", "value", "out"):
            getattr(self, name).load(getattr(layer, name))

    @property
    def params(self) -> AttentionParams:
        """Beliefs about the four projections."""
        return AttentionParams(
            self.query.params, self.key.params, self.value.params, self.out.params
        )

    def network(self, params: AttentionParams) -> nnx.MultiHeadAttention:
        """The plain `nnx.MultiHeadAttention` with these arrays."""
        return plain_attention(params, self.num_heads)

    def __call__(
        self, mean: Array, cov: Covariance | None = None, mask: Array | None = None
    ) -> tuple[Array, Covariance]:
        """Moments of the output, (..., T, D); mask (T, T) or (H, T, T), the same for the batch."""
        params = self.params
        return over_batch(
            lambda m, c: attention(m, c, params, num_heads=self.num_heads, mask=mask),
            mean,
            cov,
            self.settings.structure,
        )


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


class Encoder(BayesianModule):
    """A stack of encoder blocks; with pre-norm, a final normalisation follows.

    Args:
      num_blocks: L.
      num_features: D.
      num_heads: H, a divisor of D.
      norm_first: pre-norm if True.
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
        **settings: Any,
    ) -> None:
        self.settings = Settings(**settings)
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

    def moments(
        self, mean: Array, cov: Covariance, params: Any, mask: Array | None
    ) -> tuple[Array, Covariance]:
        """Moments of one sequence (T, D) with these beliefs."""
        blocks, final = params
        for block, beliefs in zip(self.blocks, blocks, strict=True):
            mean, cov = block.moments(mean, cov, beliefs, mask)
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
