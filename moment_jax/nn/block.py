"""Base class of encoder and decoder blocks: settings, and conversion from and to plain blocks."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Self

import jax
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.nn.activations import find_activation
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.conversion import activation_name, check_loaded, check_same
from moment_jax.nn.dense import Dense, LayerNorm
from moment_jax.nn.settings import Settings

Array = jax.Array


class Block(BayesianModule):
    """A Transformer block with beliefs about all its weights.

    Subclasses name their `parts`, modules that load the parts of a plain block of the same names,
    `plain_type` and `step_moments`, and make their attention; the feed-forward layer and two
    normalisations are made here.
    """

    parts: ClassVar[tuple[str, ...]]
    plain_type: ClassVar[Any]
    step_moments: ClassVar[Any]  # the transform of the newest tokens, with a cache

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
        self.settings = Settings.of(self, settings)
        self.num_heads = num_heads
        self.norm_first = norm_first
        self.activation = activation
        find_activation(activation)
        self.epsilon = epsilon
        self.make_attention(num_features, rngs, settings)
        hidden = 4 * num_features if hidden_features is None else hidden_features
        self.norm1 = LayerNorm(num_features, epsilon=epsilon, **settings)
        self.hidden = Dense(num_features, hidden, rngs=rngs, **settings)
        self.output = Dense(hidden, num_features, rngs=rngs, **settings)
        self.norm2 = LayerNorm(num_features, epsilon=epsilon, **settings)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the block's transform that the module settles."""
        return {
            "num_heads": self.num_heads,
            "norm_first": self.norm_first,
            "activation": find_activation(self.activation).moments,
            "epsilon": self.epsilon,
        }

    def step(
        self, mean: Array, cov: Covariance, cache: Any, params: Any
    ) -> tuple[Array, Covariance, Any]:
        """Moments of the newest tokens (N, D) of a causal sequence, and the cache with them."""
        return type(self).step_moments(mean, cov, cache, params, **self.options)

    @abc.abstractmethod
    def make_attention(self, num_features: int, rngs: nnx.Rngs, settings: dict[str, Any]) -> None:
        """Add what comes before the feed-forward layer, its random numbers drawn first."""

    @classmethod
    def from_deterministic(
        cls, block: Any, *, activation: str | None = None, **settings: Any
    ) -> Self:
        """Beliefs that start at the weights of a trained plain block.

        Args:
          block: of the class `plain_type`, or with the same attributes.
          activation: its name; found by the values of `block.activation` where None.
          settings: keyword arguments of `Settings`.

        Raises:
          ValueError: if a part of the block has no moments here, or would be lost or invented.
            TypeError: if a layer is of another type.
        """
        new = cls(**sizes_of(cls, block, activation), rngs=nnx.Rngs(0), **settings)
        new.load(block)
        return new

    def load(self, block: Any) -> None:
        """Take the weights of a plain block as means."""
        name = f"{type(self).__name__}.load"
        check_same(name, block, num_heads=self.num_heads, norm_first=self.norm_first)
        activation_name(name, block, self.activation)
        for part in self.parts:
            getattr(self, part).load(getattr(block, part))
        check_loaded(name, self, block)

    def network(self, params: Any) -> Any:
        """The plain block with these arrays."""
        return self.plain_type(
            params,
            num_heads=self.num_heads,
            norm_first=self.norm_first,
            activation=find_activation(self.activation).plain,
            epsilon=self.epsilon,
        )


def sizes_of(cls: type, block: Any, activation: str | None) -> dict[str, Any]:
    """The keyword arguments of a module `cls` with blocks like this plain one."""
    return {
        "num_features": block.hidden.in_features,
        "num_heads": block.num_heads,
        "hidden_features": block.hidden.out_features,
        "norm_first": block.norm_first,
        "activation": activation_name(f"{cls.__name__}.from_deterministic", block, activation),
        "epsilon": block.norm1.epsilon,
    }
