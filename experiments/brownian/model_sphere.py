"""Distance of a model's attended tokens from LayerNorm's sphere, by cause."""

from typing import Any

import jax.numpy as jnp
from jax import Array

import moment_jax as mj
from experiments.brownian.stream import blocks_of, residual_stream

STAGES = ("normalised", "gain", "attended")


def model_sphere(module: Any, inputs: Array) -> list[dict[str, mj.brownian.SphereGap]]:
    """Distances of each block's attention inputs from the sphere of radius sqrt(D), by cause.

    For each block, in this order: "normalised", where epsilon alone keeps tokens inside the sphere;
    "gain", after LayerNorm's gain; "attended", after its bias too, which is what queries and keys are
    made of. With pre-norm the normalisation is the block's own; with post-norm it is the last of the
    block before, and the first block has "attended" alone: nothing normalises what enters it, so Eq. 12
    need not hold there. Source: The Brownian motion in the Transformer, section 3.1.
    """
    network = module.mean_network() if hasattr(module, "mean_network") else module
    blocks = blocks_of(network).blocks
    if not all(
        hasattr(block, name) for block in blocks for name in ("norm_first", "norm1", "norm2")
    ):
        raise TypeError(
            "`model_sphere` needs blocks with `norm_first`, `norm1` and `norm2`. Got "
            f"{type(blocks[0]).__name__}. For others, call `mj.brownian.sphere_gap` on the tokens."
        )
    stream = residual_stream(network, inputs)
    return [_gaps(blocks, i, stream[i]) for i in range(len(blocks))]


def _gaps(blocks: Any, i: int, tokens: Array) -> dict[str, mj.brownian.SphereGap]:
    block = blocks[i]
    if block.norm_first:
        gain, bias = _gain_and_bias(block.norm1, tokens)
        normalised = mj.brownian.to_sphere(tokens, epsilon=block.norm1.epsilon)
        stages = [normalised, normalised * gain, normalised * gain + bias]
    elif i == 0:
        stages = [tokens]
    else:  # the stream is what comes out of the normalisation: undo its bias and gain
        gain, bias = _gain_and_bias(blocks[i - 1].norm2, tokens)
        some, scaled = gain != 0, tokens - bias
        stages = [jnp.where(some, scaled / jnp.where(some, gain, 1), 0), scaled, tokens]
    named = zip(STAGES[-len(stages) :], stages, strict=True)
    return {name: mj.brownian.sphere_gap(stage) for name, stage in named}


def _gain_and_bias(norm: Any, tokens: Array) -> tuple[Array, Array]:
    size = tokens.shape[-1]
    gain = jnp.ones(size, tokens.dtype) if norm.scale is None else norm.scale[...]
    bias = jnp.zeros(size, tokens.dtype) if norm.bias is None else norm.bias[...]
    return gain.reshape(1, 1, -1), bias.reshape(1, 1, -1)
