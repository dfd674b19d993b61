"""Base classes of encoders and decoders: `Block`, and `Stack` of blocks, scanned if they are alike."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.layers import FeedForwardParams, NormParams, layer_norm
from moment_jax.nn.activations import find_activation
from moment_jax.nn.base import BayesianModule, Moments
from moment_jax.nn.conversion import activation_name
from moment_jax.nn.layers import Dense, LayerNorm, MultiHeadAttention
from moment_jax.nn.plain import plain_norm
from moment_jax.nn.settings import Settings


class Block(BayesianModule):
    """A Transformer block with beliefs about all its weights.

    Subclasses name their `parts`, and the types of their plain network and of their parameters.
    """

    plain_type: ClassVar[Any]

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
        find_activation(activation)
        self.num_heads, self.norm_first = num_heads, norm_first
        self.activation, self.epsilon = activation, epsilon
        hidden = 4 * num_features if hidden_features is None else hidden_features
        for name in self.plain_type.attentions:
            layer = MultiHeadAttention(num_features, num_heads, rngs=rngs, **settings)
            setattr(self, name, layer)
        for name in self.plain_type.norms:
            setattr(self, name, LayerNorm(num_features, epsilon=epsilon, **settings))
        self.hidden = Dense(num_features, hidden, rngs=rngs, **settings)
        self.output = Dense(hidden, num_features, rngs=rngs, **settings)

    @property
    def params(self) -> Any:
        """Beliefs about all sublayers."""
        own = {name: getattr(self, name).params for name in self.parts}
        feed_forward = FeedForwardParams(own.pop("hidden"), own.pop("output"))
        return self.params_type(feed_forward=feed_forward, **own)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the block's transform."""
        return {
            "num_heads": self.num_heads,
            "norm_first": self.norm_first,
            "activation": find_activation(self.activation).moments,
            "epsilon": self.epsilon,
        }

    @classmethod
    def options_of(cls, network: Any, settings: dict[str, Any]) -> dict[str, Any]:
        name = f"{cls.__name__}.from_deterministic"
        return {
            "num_features": network.hidden.in_features,
            "num_heads": network.num_heads,
            "hidden_features": network.hidden.out_features,
            "norm_first": network.norm_first,
            "epsilon": network.norm1.epsilon,
            "activation": activation_name(name, network, settings.get("activation")),
        }

    @property
    def compared(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads, "norm_first": self.norm_first}

    def load(self, network: Any) -> None:
        activation_name(f"{type(self).__name__}.load", network, self.activation)
        super().load(network)

    def network(self, params: Any) -> Any:
        activation = find_activation(self.activation).plain
        return self.plain_type(params, **{**self.options, "activation": activation})


class Stack(BayesianModule):
    """Blocks one after another; with pre-norm, a final normalisation follows.

    Subclasses name the type of their blocks and of the plain stack.
    """

    parts = ("blocks", "final_norm")
    params_type = staticmethod(lambda blocks, final_norm: (blocks, final_norm))
    block_type: ClassVar[Any]
    plain_type: ClassVar[Any]

    def __init__(
        self,
        num_blocks: int,
        num_features: int,
        num_heads: int,
        *,
        remat: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"`{type(self).__name__}` needs num_blocks >= 1. Got {num_blocks}.")
        self.settings = Settings.of(self, options, self.block_type)
        block = partial(self.block_type, num_features, num_heads, rngs=rngs, **options)
        self.blocks = nnx.List(block() for _ in range(num_blocks))
        self.remat, self.epsilon = remat, self.blocks[0].epsilon
        norm = partial(LayerNorm, num_features, epsilon=self.epsilon)
        settings = dataclasses.asdict(self.settings)
        self.final_norm = nnx.data(norm(**settings) if self.blocks[0].norm_first else None)

    @classmethod
    def options_of(cls, network: Any, settings: dict[str, Any]) -> dict[str, Any]:
        blocks = network.blocks
        return {"num_blocks": len(blocks), **cls.block_type.options_of(blocks[0], settings)}

    def network(self, params: tuple[list[Any], NormParams | None]) -> Any:
        blocks, final = params
        features = self.blocks[0].norm1.scale.mean.shape[0]
        return self.plain_type(
            [block.network(arrays) for block, arrays in zip(self.blocks, blocks, strict=True)],
            None if final is None else plain_norm(final, features, self.epsilon),
        )

    def _through(
        self,
        one: Callable[[Any, Array, Covariance, Any], Moments],
        mean: Array,
        cov: Covariance,
        params: tuple[list[Any], NormParams | None],
    ) -> Moments:
        """Moments after all blocks and the normalisation; `one` takes (block, mean, cov, beliefs)."""
        beliefs, final = params

        def through(block: Any, at: Moments, own: Any) -> Moments:
            layer = partial(one, block)
            return (jax.checkpoint(layer) if self.remat else layer)(*at, own)

        at = mean, cov
        if _alike(self.blocks, beliefs):  # one block is compiled, whatever their number
            at = mean, self._begun(cov, beliefs)
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *beliefs)
            dtype = jnp.result_type(*jax.tree.leaves((at, stacked)))
            at = jax.tree.map(lambda leaf: leaf.astype(dtype), at)
            first = self.blocks[0]
            at, _ = jax.lax.scan(lambda at, own: (through(first, at, own), None), at, stacked)
        else:
            for block, own in zip(self.blocks, beliefs, strict=True):
                at = through(block, at, own)
        mean, cov = at
        if final is None:
            return mean, cov
        return layer_norm(mean, self._begun(cov, final), final, epsilon=self.epsilon)


def _alike(blocks: Sequence[Any], beliefs: Sequence[Any]) -> bool:
    """Whether the blocks differ only in numbers; blocks with pruned heads do not."""

    def layout(block: Any, own: Any) -> Any:
        arrays = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(own)]
        return block.options, jax.tree.structure(own), arrays

    first, *others = map(layout, blocks, beliefs)
    return all(each == first for each in others)
