"""Base classes of encoders and decoders: `Block`, and `Stack` of blocks, scanned if they are alike."""

import abc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.covariance.statistics import checkpoint, scan
from moment_jax.layers import NormParams, layer_norm
from moment_jax.nn.activations import find_activation
from moment_jax.nn.base import BayesianModule, Moments
from moment_jax.nn.conversion import activation_name, check_loaded, check_same
from moment_jax.nn.layers import Dense, LayerNorm
from moment_jax.nn.plain import plain_norm
from moment_jax.nn.settings import Settings


class Block(BayesianModule):
    """A Transformer block with beliefs about all its weights.

    Subclasses name their `parts`, `plain_type` and `step_moments`, and create their attention; the
    feed-forward layer and two normalisations are created here.
    """

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

    @abc.abstractmethod
    def make_attention(self, num_features: int, rngs: nnx.Rngs, settings: dict[str, Any]) -> None:
        """Create the sublayers before the feed-forward layer."""

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the block's transform."""
        return {
            "num_heads": self.num_heads,
            "norm_first": self.norm_first,
            "activation": find_activation(self.activation).moments,
            "epsilon": self.epsilon,
        }

    def step(
        self, mean: Array, cov: Covariance, cache: Any, params: Any
    ) -> tuple[Array, Covariance, Any]:
        """Moments of the newest tokens (N, D) of a causal sequence, and the updated cache."""
        return type(self).step_moments(mean, cov, cache, params, **self.options)

    @classmethod
    def options_of(cls, network: Any, settings: dict[str, Any]) -> dict[str, Any]:
        """See `BayesianModule`."""
        return {**block_options(cls, network, settings), "rngs": nnx.Rngs(0)}

    def load(self, network: Any) -> None:
        """Take the weights of a plain block of the same sizes as means."""
        name = f"{type(self).__name__}.load"
        check_same(name, network, num_heads=self.num_heads, norm_first=self.norm_first)
        activation_name(name, network, self.activation)
        super().load(network)

    def network(self, params: Any) -> Any:
        """The plain block with these arrays."""
        activation = find_activation(self.activation).plain
        return self.plain_type(params, **{**self.options, "activation": activation})


def block_options(cls: type, block: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a module `cls` with blocks like this plain one, and these settings."""
    name = f"{cls.__name__}.from_deterministic"
    return {
        "num_features": block.hidden.in_features,
        "num_heads": block.num_heads,
        "hidden_features": block.hidden.out_features,
        "norm_first": block.norm_first,
        "epsilon": block.norm1.epsilon,
        **settings,
        "activation": activation_name(name, block, settings.get("activation")),
    }


class Stack(BayesianModule):
    """Blocks one after another; with pre-norm, a final normalisation follows.

    Subclasses name the type of their blocks and of the plain stack.
    """

    block_type: ClassVar[Any]
    plain_type: ClassVar[Any]

    def __init__(
        self,
        num_blocks: int,
        num_features: int,
        num_heads: int,
        *,
        norm_first: bool = False,
        epsilon: float = 1e-6,
        hidden_features: int | None = None,
        activation: str = "relu",
        remat: bool = False,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"`{type(self).__name__}` needs num_blocks >= 1. Got {num_blocks}.")
        self.settings = Settings.of(self, settings)
        block = partial(
            self.block_type, num_features, num_heads, norm_first=norm_first, epsilon=epsilon
        )
        own = {"hidden_features": hidden_features, "activation": activation, "rngs": rngs}
        self.blocks = nnx.List(block(**own, **settings) for _ in range(num_blocks))
        self.remat, self.epsilon = remat, epsilon
        self.final_norm = nnx.data(
            LayerNorm(num_features, epsilon=epsilon, **settings) if norm_first else None
        )

    @classmethod
    def options_of(cls, network: Any, settings: dict[str, Any]) -> dict[str, Any]:
        """See `BayesianModule`."""
        own = {"num_blocks": len(network.blocks), "rngs": nnx.Rngs(0)}
        return {**own, **block_options(cls, network.blocks[0], settings)}

    def load(self, network: Any) -> None:
        """Take the weights of a plain stack of the same sizes as means."""
        name = f"{type(self).__name__}.load"
        if len(self.blocks) != len(network.blocks):
            raise ValueError(
                f"`{name}` needs {len(self.blocks)} blocks. Got {len(network.blocks)}."
            )
        if (self.final_norm is None) != (network.final_norm is None):
            raise ValueError(
                f"`{name}` needs a final normalisation with pre-norm, and none with post-norm. Got "
                f"final_norm={network.final_norm}."
            )
        for mine, theirs in zip(self.blocks, network.blocks, strict=True):
            mine.load(theirs)
        if self.final_norm is not None:
            self.final_norm.load(network.final_norm)
        check_loaded(name, self, network)

    @property
    def params(self) -> tuple[list[Any], NormParams | None]:
        """Beliefs about all blocks, and about the final normalisation."""
        final = None if self.final_norm is None else self.final_norm.params
        return [block.params for block in self.blocks], final

    def network(self, params: tuple[list[Any], NormParams | None]) -> Any:
        """The plain stack with these arrays."""
        blocks, final = params
        features = self.blocks[0].norm1.scale.mean.shape[0]
        return self.plain_type(
            [block.network(arrays) for block, arrays in zip(self.blocks, blocks, strict=True)],
            None if final is None else plain_norm(final, features, self.epsilon),
        )

    def _through(
        self,
        step: Callable[..., Moments],
        mean: Array,
        cov: Covariance,
        params: tuple[list[Any], NormParams | None],
    ) -> Moments:
        """Moments after `step` (block, mean, cov, beliefs) of all blocks and the normalisation."""
        beliefs, final = params

        def one(block: Any, at: Any, own: Any, _: None) -> Any:
            layer = partial(step, block)
            return (checkpoint(layer) if self.remat else layer)(*at, own), None

        (mean, cov), _ = self._each(one, (mean, cov), beliefs, None)
        return self._normalised(mean, cov, final)

    def _each(self, step: Callable[..., Any], start: Any, beliefs: Any, caches: Any) -> Any:
        """The state after `step` (block, state, beliefs, cache) -> (state, cache) of all blocks."""
        if _alike(self.blocks, beliefs):
            # One block is compiled, whatever their number.
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *beliefs)
            dtype = jnp.result_type(*jax.tree.leaves((start, stacked)))
            start = jax.tree.map(lambda leaf: leaf.astype(dtype), start)
            block = self.blocks[0]
            return scan(lambda at, own: step(block, at, *own), start, (stacked, caches))
        new = []
        for i, (block, own) in enumerate(zip(self.blocks, beliefs, strict=True)):
            cache = jax.tree.map(lambda leaf, i=i: leaf[i], caches)
            start, cache = step(block, start, own, cache)
            new.append(cache)
        return start, stack_caches(new)

    def _normalised(self, mean: Array, cov: Covariance, final: NormParams | None) -> Moments:
        return (mean, cov) if final is None else layer_norm(mean, cov, final, epsilon=self.epsilon)

    def step(
        self, mean: Array, cov: Covariance | None, cache: Any
    ) -> tuple[Array, Covariance, Any]:
        """Moments of the newest tokens only, equal to those of a whole pass with a causal mask.

        A step's cost grows with the size of the cache. A whole prompt can be one step.

        Args:
          mean: of the newest tokens, (..., N, D).
          cov: their covariance; None where they are certain.
          cache: from `start`, or from the step before.

        Returns:
          Mean (..., N, D), covariance, and the cache for the next step.
        """
        beliefs, final = self.params

        def one(block: Any, at: Any, own: Any, cache: Any) -> Any:
            mean, cov, cache = block.step(*at, cache, own)
            return (mean, cov), cache

        def run(mean: Array, cov: Covariance, caches: Any) -> Any:
            (mean, cov), caches = self._each(one, (mean, cov), beliefs, caches)
            return *self._normalised(mean, cov, final), caches

        return self._over_batch(run, (mean, cov), cache=cache)


def stack_caches(caches: Sequence[Any], batch: tuple[int, ...] = ()) -> Any:
    """The caches of all blocks on one axis, which follows the leading axes of a batch."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*batch, *leaf.shape)), stacked)


def _alike(blocks: Sequence[Any], beliefs: Sequence[Any]) -> bool:
    """Whether the blocks differ only in numbers; blocks with pruned heads do not."""
    layouts = {
        (
            block.num_heads,
            block.norm_first,
            block.activation,
            block.epsilon,
            jax.tree.structure(own),
            tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(own)),
        )
        for block, own in zip(blocks, beliefs, strict=True)
    }
    return len(layouts) == 1
