"""How far a model is from the paper's chain: its scores' parts, and its tokens' sphere."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

import moment_jax as mj
from experiments.brownian.stream import blocks_of, residual_stream


class ScoreParts(NamedTuple):
    """A matrix as symmetric + gradient + cyclic, and the share of each in its squared norm.

    The chain softmax(s) is reversible exactly where the cyclic part is zero. All shares are zero where
    every row is constant; else they sum to one.
    """

    symmetric: Array  # (s + s^T)/2
    gradient: Array  # the part g_j - g_i of the antisymmetric rest
    cyclic: Array  # what is left: flow around cycles of tokens
    symmetric_share: Array
    gradient_share: Array
    cyclic_share: Array


def split_scores(scores: Array) -> ScoreParts:
    """Split scores (T, T) into the parts of a reversible chain and the part that makes it irreversible.

    The rows of scores are centred first: a softmax does not see a constant in its row.
    Detailed balance pi_i P_ij = pi_j P_ji for P = softmax(s) says s_ij - s_ji = g_j - g_i for some
    g, so the antisymmetric part is projected onto such differences; what is left is orthogonal to them.
    """
    if scores.ndim != 2 or scores.shape[0] != scores.shape[1]:
        raise ValueError(f"`split_scores` needs scores (T, T). Got {tuple(scores.shape)}.")
    scores = scores - jnp.mean(scores, axis=1, keepdims=True)
    symmetric, antisymmetric = (scores + scores.T) / 2, (scores - scores.T) / 2
    height = jnp.mean(antisymmetric, axis=0)
    gradient = height[None, :] - height[:, None]
    cyclic = antisymmetric - gradient
    squares = [jnp.sum(part**2) for part in (symmetric, gradient, cyclic)]
    total = sum(squares[1:], squares[0])
    share = [square / jnp.where(total > 0, total, 1) for square in squares]
    return ScoreParts(symmetric, gradient, cyclic, *share)


def antisymmetric_share(query_kernel: Array, key_kernel: Array) -> Array:
    """Antisymmetric share of the squared norm of one head's form Wq Wk^T, of kernels (D, K).

    With identity projections it is 0; with independent random ones about a half. The
    form's antisymmetric part is what can make attention's chain irreversible; how much of it the tokens
    see is `split_scores` of their scores.
    """
    if query_kernel.ndim != 2 or query_kernel.shape != key_kernel.shape:
        raise ValueError(
            "`antisymmetric_share` needs two kernels (D, K) of one head. Got "
            f"{tuple(query_kernel.shape)} and {tuple(key_kernel.shape)}. For all heads, use jax.vmap "
            "with in_axes=1 on kernels (D, H, K)."
        )
    form = query_kernel @ key_kernel.T
    total = jnp.sum(form**2)
    return jnp.sum((form - form.T) ** 2) / 4 / jnp.where(total > 0, total, 1)


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
