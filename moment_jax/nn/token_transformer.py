"""`TokenTransformer`: a sequence of vectors in, moments of a vector at every token out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.layers import dense
from moment_jax.layers.params import DenseParams
from moment_jax.nn.base import BayesianModule, set_mean
from moment_jax.nn.batching import over_batch
from moment_jax.nn.dense import Dense
from moment_jax.nn.encoder import Encoder
from moment_jax.nn.plain import PlainEncoder, plain_linear
from moment_jax.nn.settings import Settings
from moment_jax.posterior import Point, Posterior
from moment_jax.reference import Stage, sample_params

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenTransformerParams:
    """Beliefs about a `TokenTransformer`, or one draw of them."""

    embed: Any
    position: Any
    encoder: Any
    head: Any


class PlainTokenTransformer(nnx.Module):
    """Embedding, positions, encoder, and a linear head at every token, of Flax's own layers."""

    def __init__(
        self, embed: nnx.Linear, position: Array, encoder: PlainEncoder, head: nnx.Linear
    ) -> None:
        self.embed = embed
        self.position = nnx.Param(position)
        self.encoder = encoder
        self.head = head

    def __call__(self, x: Array) -> Array:
        """(..., T, in) -> (..., T, out)."""
        return self.head(self.encoder(self.embed(x) + self.position[...]))


class TokenTransformer(BayesianModule):
    """Dense embedding + learned positions -> encoder -> dense head at every token.

    With one-hot inputs the embedding's kernel is a table of random rows.

    Args:
      num_tokens: T.
      in_features: numbers at every token of the input.
      out_features: numbers at every token of the output.
      num_features: D.
      num_heads: H, a divisor of D.
      num_blocks: L.
      hidden_features: width of the feed-forward layers; 4 D where None.
      norm_first: pre-norm if True.
      activation: "relu", "gelu", "tanh" or "silu".
      position_scale: sd of the positions' means at the start. As large as the tokens by default: with
        Flax's customary 0.02 a small network takes long to tell places apart.
      rngs: Flax random streams.
      settings: keyword arguments of `Settings`.

    Raises:
      ValueError: if the heads do not divide the features, or the activation is unknown.
    """

    def __init__(
        self,
        num_tokens: int,
        in_features: int,
        out_features: int,
        *,
        num_features: int = 32,
        num_heads: int = 4,
        num_blocks: int = 1,
        hidden_features: int | None = None,
        norm_first: bool = True,
        activation: str = "gelu",
        position_scale: float = 1.0,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        self.settings = Settings(**settings)
        self.embed = Dense(in_features, num_features, rngs=rngs, **settings)
        shape = (num_tokens, num_features)
        start = position_scale * jax.random.normal(rngs.params(), shape, self.settings.dtype)
        self.position = self.settings.entries(start, num_features)
        self.encoder = Encoder(
            num_blocks,
            num_features,
            num_heads,
            norm_first=norm_first,
            hidden_features=hidden_features,
            activation=activation,
            rngs=rngs,
            **settings,
        )
        self.head = Dense(num_features, out_features, rngs=rngs, **settings)

    def load(self, network: PlainTokenTransformer) -> None:
        """Take the weights of a plain network as means."""
        self.embed.load(network.embed)
        set_mean(self.position, network.position[...])
        self.encoder.load(network.encoder)
        self.head.load(network.head)

    @property
    def params(self) -> TokenTransformerParams:
        """Beliefs about all weights."""
        return TokenTransformerParams(
            self.embed.params, self.position.posterior, self.encoder.params, self.head.params
        )

    def network(self, params: TokenTransformerParams) -> PlainTokenTransformer:
        """The plain network with these arrays."""
        return PlainTokenTransformer(
            plain_linear(params.embed),
            params.position,
            self.encoder.network(params.encoder),
            plain_linear(params.head),
        )

    @property
    def stages(self) -> list[Stage]:
        """Embedding, the encoder's, and the head."""
        params = self.params

        def embed(key: Array, x: Array) -> Array:
            layer, position = sample_params((params.embed, params.position), key)
            return plain_linear(layer)(x) + position

        return [
            Stage("embedding", lambda m, c: _embedded(m, c, params.embed, params.position), embed),
            *self.encoder.stages,
            *(stage._replace(name="head") for stage in self.head.stages),
        ]

    def moments(
        self, mean: Array, cov: Covariance, params: TokenTransformerParams
    ) -> tuple[Array, Covariance]:
        """Moments of one sequence, (T, in) -> (T, out), with these beliefs."""
        if tuple(mean.shape) != (params.position.shape[0], params.embed.kernel.shape[0]):
            raise ValueError(
                "`TokenTransformer` needs sequences of shape (T, in) == "
                f"({params.position.shape[0]}, {params.embed.kernel.shape[0]}). Got "
                f"{tuple(mean.shape)}."
            )
        mean, cov = _embedded(mean, cov, params.embed, params.position)
        mean, cov = self.encoder.moments(mean, cov, params.encoder, None)
        return dense(mean, cov, params.head)

    def __call__(self, mean: Array, cov: Covariance | None = None) -> tuple[Array, Covariance]:
        """Moments of the output: (..., T, in) -> (..., T, out); cov None where x is certain."""
        params = self.params
        return over_batch(
            lambda m, c: self.moments(m, c, params), mean, cov, self.settings.structure
        )


def _embedded(
    mean: Array, cov: Covariance, embed: DenseParams, position: Posterior
) -> tuple[Array, Covariance]:
    mean, cov = dense(mean, cov, embed)
    mean = mean + position.mean
    if not isinstance(position, Point):
        cov = cov.add(type(cov).independent(position.marginal_variance()))
    return mean, cov
