"""Stacks of blocks: scanned if they differ only in their beliefs, otherwise a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from moment_jax.covariance import Covariance
from moment_jax.covariance.statistics import checkpoint, scan
from moment_jax.layers import NormParams, layer_norm
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.block import sizes_of
from moment_jax.nn.conversion import check_loaded
from moment_jax.nn.dense import LayerNorm
from moment_jax.nn.plain import plain_norm
from moment_jax.nn.settings import Settings

Array = jax.Array


class Stack(BayesianModule):
    """Blocks one after another; with pre-norm, a final normalisation follows.

    Subclasses say of which `block_type`, and which `plain_type` holds plain blocks.
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
    def from_deterministic(
        cls, stack: Any, *, activation: str | None = None, **settings: Any
    ) -> Self:
        """Beliefs that start at the weights of a trained plain stack; see `Block.from_deterministic`."""
        sizes = sizes_of(cls, stack.blocks[0], activation)
        new = cls(len(stack.blocks), **sizes, rngs=nnx.Rngs(0), **settings)
        new.load(stack)
        return new

    def load(self, stack: Any) -> None:
        """Take the weights of a plain stack as means."""
        name = f"{type(self).__name__}.load"
        if len(self.blocks) != len(stack.blocks):
            raise ValueError(f"`{name}` needs {len(self.blocks)} blocks. Got {len(stack.blocks)}.")
        if (self.final_norm is None) != (stack.final_norm is None):
            raise ValueError(
                f"`{name}` needs a final normalisation with pre-norm, and none with post-norm. Got "
                f"final_norm={stack.final_norm}."
            )
        for mine, theirs in zip(self.blocks, stack.blocks, strict=True):
            mine.load(theirs)
        if self.final_norm is not None:
            self.final_norm.load(stack.final_norm)
        check_loaded(name, self, stack)

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
        step: Callable[..., tuple[Array, Covariance]],
        mean: Array,
        cov: Covariance,
        params: tuple[list[Any], NormParams | None],
    ) -> tuple[Array, Covariance]:
        """Moments after all blocks, by `step` (block, mean, cov, beliefs), and the normalisation."""
        beliefs, final = params

        def step_of(block: Any) -> Callable[..., tuple[Array, Covariance]]:
            return checkpoint(partial(step, block)) if self.remat else partial(step, block)

        if _alike(self.blocks, beliefs):
            # One block is compiled, whatever their number.
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *beliefs)
            dtype = jnp.result_type(mean, *jax.tree.leaves(stacked))
            start = jax.tree.map(lambda leaf: leaf.astype(dtype), (mean, cov))
            first = step_of(self.blocks[0])
            (mean, cov), _ = scan(lambda at, own: (first(*at, own), None), start, stacked)
        else:
            for block, own in zip(self.blocks, beliefs, strict=True):
                mean, cov = step_of(block)(mean, cov, own)
        return (mean, cov) if final is None else layer_norm(mean, cov, final, epsilon=self.epsilon)

    def step(
        self, mean: Array, cov: Covariance | None, cache: Any
    ) -> tuple[Array, Covariance, Any]:
        """Moments of the newest tokens alone, as the whole pass with a causal mask would give them.

        A step costs as much as there is room in the cache. A whole prompt can come in one step.

        Args:
          mean: of the newest tokens, (..., N, D).
          cov: their covariance; None where they are certain.
          cache: from `start`, or from the step before.

        Returns:
          Mean (..., N, D), covariance, and the next step's cache.
        """
        blocks, final = self.params

        def run(mean: Array, cov: Covariance, cache: Any) -> Any:
            mean, cov, cache = through_steps(self.blocks, blocks, cache, mean, cov)
            if final is not None:
                mean, cov = layer_norm(mean, cov, final, epsilon=self.epsilon)
            return mean, cov, cache

        return self._over_batch(run, (mean, cov), cache=cache)


def through_steps(
    blocks: Sequence[Any], beliefs: Sequence[Any], caches: Any, mean: Array, cov: Covariance
) -> tuple[Array, Covariance, Any]:
    """Moments of the newest tokens after all blocks, and the blocks' caches with them.

    Args:
      blocks: modules with a `step`.
      beliefs: each block's.
      caches: of all blocks, on a leading axis.
      mean: of the newest tokens, (N, D).
      cov: its covariance.
    """
    if _alike(blocks, beliefs):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *beliefs)

        def scanned(carry: Any, own: Any) -> Any:
            mean, cov, cache = blocks[0].step(*carry, *own)
            return (mean, cov), cache

        (mean, cov), caches = scan(scanned, (mean, cov), (caches, stacked))
        return mean, cov, caches
    new = []
    for i, (block, own) in enumerate(zip(blocks, beliefs, strict=True)):
        mean, cov, cache = block.step(mean, cov, jax.tree.map(lambda c, i=i: c[i], caches), own)
        new.append(cache)
    return mean, cov, stack_caches(new)


def stack_caches(caches: Sequence[Any], batch: tuple[int, ...] = ()) -> Any:
    """The caches of all blocks on one axis, after the leading axes of a batch."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*batch, *leaf.shape)), stacked)


def _alike(blocks: Sequence[Any], beliefs: Sequence[Any]) -> bool:
    """Whether the blocks differ by numbers alone; blocks with pruned heads do not."""
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
