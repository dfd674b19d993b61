"""Turns the sums that backward passes return into factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moment_jax.optim.factors import (
    DiagonalFactor,
    EmbeddingFactor,
    Factor,
    Factors,
    KroneckerFactor,
    RowFactor,
)
from moment_jax.optim.layer_blocks import Blocks, DenseBlock, EmbeddingBlock, LayerBlock
from moment_jax.optim.trees import flatten

Array = jax.Array


def as_factors(blocks: Blocks, stats: Any, correction: float) -> Factors:
    """Factors from sums over a batch.

    Args:
      blocks: the layers.
      stats: cotangents of the dummy arguments.
      correction: multiplies what is quadratic in the gradients: 1/N for gradients of each example's own
        loss, N for those of an average over N examples.
    """
    factors: dict[str, Factor] = {}
    for block in blocks:
        get = _of_block(block, stats)
        rows = jnp.maximum(get["rows"], 1)
        one = jnp.ones((), rows.dtype)
        if isinstance(block, DenseBlock):
            inputs = get["inputs"] / rows[:, None, None]
            factors[block.name] = KroneckerFactor(inputs, get["outputs"] * correction, one)
        elif isinstance(block, EmbeddingBlock):
            frequencies = get["frequencies"] / rows[:, None]
            factors[block.name] = EmbeddingFactor(frequencies, get["outputs"] * correction, one)
        else:
            factors[block.name] = DiagonalFactor(get["squares"] * correction, one)
    return factors


def as_row_factors(blocks: Blocks, stats: Any, size: int, every_token: bool) -> Factors:
    """Rows of the dense layers, with a leading axis of `size` examples; averages for the others."""
    summed = jax.tree.map(lambda x: jnp.sum(x, axis=0), stats)
    others = tuple(block for block in blocks if not isinstance(block, DenseBlock))
    factors = as_factors(others, summed, 1 / size)
    for block in blocks:
        if isinstance(block, DenseBlock):
            get = _of_block(block, stats, lead=1)
            a, g = (jnp.swapaxes(get[name], 0, 1) for name in ("a", "g"))
            if every_token:  # F divides by N T rows; g makes up for the T
                g = g * g.shape[2] ** 0.5
                a, g = (x.reshape(x.shape[0], -1, 1, x.shape[-1]) for x in (a, g))
            factors[block.name] = RowFactor(a, g, jnp.ones((), a.dtype))
    return {block.name: factors[block.name] for block in blocks}


def check_called(
    blocks: Blocks, stats: Any, loss: Callable[..., Any], taps: Any, params: Any
) -> None:
    """Raise unless the loss calls every layer, that is, depends on its dummy arguments."""
    leaves = flatten(stats)
    rows = {_owner(name): count for name, count in leaves.items() if name.endswith("tap_rows")}
    traced = any(isinstance(count, jax.core.Tracer) for count in rows.values())
    used = _used(loss, taps, params) if traced else {n for n, c in rows.items() if jnp.any(c > 0)}
    for block in blocks:
        if block.name not in used:
            raise ValueError(
                f"The loss does not call layer {block.name!r}, so it has no curvature. Leave its "
                f"parameters ({', '.join(block.leaves)}) out of `wrt`, or call it."
            )


def _used(loss: Callable[..., Any], taps: Any, params: Any) -> set[str]:
    """Names of the layers whose dummy arguments the loss depends on."""
    closed = jax.make_jaxpr(loss)(taps, params)
    names = list(flatten(taps))
    seen = {id(var) for equation in closed.jaxpr.eqns for var in equation.invars}
    inputs = closed.jaxpr.invars[: len(names)]
    return {_owner(name) for name, var in zip(names, inputs, strict=True) if id(var) in seen}


def _owner(path: str) -> str:
    """The layer that a dummy argument belongs to."""
    return path.rpartition("/")[0] or "model"


def _of_block(block: LayerBlock, stats: Any, lead: int = 0) -> dict[str, Array]:
    """The statistics of one layer by name, (*lead axes, L, ...)."""
    found = {}
    for path, value in flatten(stats).items():
        if _owner(path) == block.name:
            name = path.rpartition("/")[2].removeprefix("tap_")
            shape = (*value.shape[:lead], block.count, *value.shape[lead + len(block.stack) :])
            found[name] = value.reshape(shape)
    return found
