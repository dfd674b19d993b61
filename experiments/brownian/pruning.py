"""Masking and removing the heads of attention: beliefs of all families."""

import copy
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import moment_jax as mj
from experiments.brownian.stream import blocks_of


def mask_heads(params: mj.AttentionParams, kept: Array) -> mj.AttentionParams:
    """Beliefs about attention with the queries, keys and values of heads outside `kept` set to zero.

    A head enters the output through its values alone; queries and keys are taken out with them, because
    some structures keep one token correlation for the queries of all heads. So the moments are those of
    the module without the head, for every family of beliefs and every structure. `kept` may be traced:
    one compiled pass serves all masks.

    Args:
      params: beliefs about attention, heads outermost in its kernels (D, H K).
      kept: (H,) booleans, or zeros and ones.
    """
    kept = jnp.asarray(kept)
    width = params.value.kernel.shape[1]
    if kept.ndim != 1 or not kept.size or width % kept.size:
        raise ValueError(
            f"`mask_heads` needs one number for each head, H a divisor of {width}. Got "
            f"{tuple(kept.shape)}."
        )

    def masked(dense: mj.DenseParams) -> mj.DenseParams:
        factor = kept.astype(dense.kernel.mean.dtype)
        factor = jnp.repeat(factor, dense.kernel.shape[1] // kept.shape[0])
        bias = None if dense.bias is None else _scaled(dense.bias, factor)
        return mj.DenseParams(_scaled(dense.kernel, factor), bias)

    return mj.AttentionParams(
        masked(params.query), masked(params.key), masked(params.value), params.output
    )


def _scaled(belief: mj.posterior.Posterior, factor: Array) -> mj.posterior.Posterior:
    """The belief about an array scaled along its last axis."""

    def times(array: Array, by: Array) -> Array:
        return array * by.reshape(*(1,) * (array.ndim - by.ndim), *by.shape)

    mean = times(belief.mean, factor)
    match belief:
        case mj.posterior.Point():
            return mj.posterior.Point(mean)
        case mj.posterior.Factorized() | mj.posterior.OutputShared():
            return type(belief)(mean, times(belief.variance, factor**2))
        case mj.posterior.MatrixNormal():
            out_cov = belief.out_cov * jnp.outer(factor, factor)
            return mj.posterior.MatrixNormal(mean, belief.in_cov, out_cov)
        case mj.posterior.FullNormal():
            entries = jnp.broadcast_to(factor, mean.shape).ravel()
            both = jnp.outer(entries, entries).reshape(belief.cov.shape)
            return mj.posterior.FullNormal(mean, belief.cov * both)
    raise TypeError(
        "Heads need beliefs of mj.posterior: Point, Factorized, OutputShared, MatrixNormal or "
        f"FullNormal. Got {type(belief).__name__}."
    )


def marginal(
    belief: mj.posterior.Posterior, chosen: np.ndarray, axis: int
) -> mj.posterior.Posterior:
    """The belief about some rows (axis 0) or columns (axis -1) of a kernel, or entries of a bias."""
    if belief.mean.ndim == 1:  # of independent entries, or with their covariance
        square = np.ix_(chosen, chosen)
        return jax.tree.map(lambda x: x[chosen] if x.ndim == 1 else x[square], belief)
    if axis == 0:
        return belief.rows(jnp.asarray(chosen))
    if isinstance(belief, mj.posterior.OutputShared):  # transposed it is of another family
        return mj.posterior.OutputShared(belief.mean[:, chosen], belief.variance[chosen])
    return belief.transpose().rows(jnp.asarray(chosen)).transpose()


def parts_of_heads(attention: Any) -> list[tuple[Any, int]]:
    """The beliefs of an `mj.nn.MultiHeadAttention` that are split by head, and the axis of the split."""
    parts = []
    for dense in (attention.query, attention.key, attention.value):
        parts += [(belief, -1) for belief in (dense.kernel, dense.bias) if belief is not None]
    return [*parts, (attention.out.kernel, 0)]


def entries_of(kept: np.ndarray, size: int) -> np.ndarray:
    """Indices of the entries of an axis, heads outermost, that belong to the heads kept."""
    return np.flatnonzero(np.repeat(kept, size // len(kept)))


def prune_heads(module: Any, kept: Sequence[Any]) -> Any:
    """A copy of the module without the heads that are not kept.

    The beliefs that remain are the marginals of those there were, so moments and samples are those of
    the module whose heads are masked, at the cost of a smaller one.

    Args:
      module: an `Encoder` or `VisionTransformer` of `mj.nn`.
      kept: for each block, (H,) booleans, at least one of them true.
    """
    masks = [np.asarray(mask, bool) for mask in kept]
    heads = [block.num_heads for block in blocks_of(module).blocks]
    if [mask.shape for mask in masks] != [(h,) for h in heads]:
        raise ValueError(
            f"`prune_heads` needs booleans for the heads of each block, {heads} of them. Got arrays of "
            f"shapes {[mask.shape for mask in masks]}."
        )
    empty = [i for i, mask in enumerate(masks) if not mask.any()]
    if empty:
        raise ValueError(
            f"`prune_heads` needs at least one head in every block. Got none for block {empty[0]}. "
            "`head_predictions` masks all of them."
        )
    smaller = copy.deepcopy(module)
    for block, mask in zip(blocks_of(smaller).blocks, masks, strict=True):
        for belief, axis in parts_of_heads(block.attention):
            chosen = entries_of(mask, belief.mean.shape[axis])
            belief.hold(marginal(belief.posterior, chosen, axis))
        block.num_heads = block.attention.num_heads = int(mask.sum())
    return smaller
