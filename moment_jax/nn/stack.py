"""A stack of blocks: scanned where they differ by their beliefs alone, in a loop otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moment_jax.covariance import Covariance

Array = jax.Array


def through_blocks(
    blocks: Sequence[Any],
    step: Callable[[Any], Callable[..., Any]],
    beliefs: Sequence[Any],
    mean: Array,
    cov: Covariance,
) -> tuple[Array, Covariance]:
    """Moments after all blocks.

    Args:
      blocks: modules with `num_heads`, `norm_first`, `activation` and `epsilon`.
      step: block -> its transform (mean, cov, beliefs) -> (mean, cov).
      beliefs: each block's.
      mean: of one sequence, (T, D).
      cov: its covariance.
    """
    if not _alike(blocks, beliefs):
        for block, own in zip(blocks, beliefs, strict=True):
            mean, cov = step(block)(mean, cov, own)
        return mean, cov
    # One block is compiled, whatever their number.
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *beliefs)
    dtype = jnp.result_type(mean, *jax.tree.leaves(stacked))
    start = jax.tree.map(lambda leaf: leaf.astype(dtype), (mean, cov))
    first = step(blocks[0])
    (mean, cov), _ = jax.lax.scan(lambda carry, own: (first(*carry, own), None), start, stacked)
    return mean, cov


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
