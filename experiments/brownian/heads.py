"""Heads masked, and their importance: the change of the ELBO without each."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.brownian.stream import blocks_of, enter


def mask_heads(params: mj.AttentionParams, kept: Array) -> mj.AttentionParams:
    """Beliefs about attention with the queries, keys and values of heads outside `kept` set to zero.

    A head enters the output through its values alone; queries and keys are taken out with them, because
    some structures keep one token correlation for the queries of all heads. So the moments are those of
    the module without the head. `kept` may be traced: one compiled pass serves all masks.

    Args:
      params: `Factorized` beliefs about attention, heads outermost in its kernels (D, H K).
      kept: (H,) booleans, or zeros and ones.
    """
    kept = jnp.asarray(kept)
    width = params.value.kernel.shape[1]
    if kept.ndim != 1 or not kept.size or width % kept.size:
        raise ValueError(
            f"`mask_heads` needs one number for each head, H a divisor of {width}. Got "
            f"{tuple(kept.shape)}."
        )

    def scaled(belief: Any) -> mj.posterior.Factorized:
        factor = jnp.repeat(kept.astype(belief.mean.dtype), width // kept.size)
        factor = factor.reshape(*(1,) * (belief.mean.ndim - 1), -1)
        return mj.posterior.Factorized(belief.mean * factor, belief.variance * factor**2)

    query, key, value = (
        mj.DenseParams(scaled(dense.kernel), None if dense.bias is None else scaled(dense.bias))
        for dense in (params.query, params.key, params.value)
    )
    return mj.AttentionParams(query, key, value, params.output)


def head_predictions(module: Any, inputs: Array, masks: np.ndarray) -> tuple[Array, Array]:
    """Mean (M, N, C) and covariance (M, N, C, C) of the logits, under M masks of the heads.

    Args:
      module: a `VisionTransformer` of `mj.nn`.
      inputs: a batch (N, ...).
      masks: (M, heads of all blocks) booleans. One compiled pass serves all.
    """
    if blocks_of(module) is module:
        raise TypeError(
            "`head_predictions` needs a module that gives logits, such as mj.nn.VisionTransformer. Got "
            f"{type(module).__name__}."
        )
    total = sum(block.num_heads for block in module.encoder.blocks)
    if np.shape(masks)[1:] != (total,):
        raise ValueError(
            f"`head_predictions` needs masks (M, {total}), the heads of all blocks. Got "
            f"{np.shape(masks)}."
        )
    return _masked_logits(*nnx.split(module), jnp.asarray(inputs), jnp.asarray(masks))


@partial(jax.jit, static_argnums=0)
def _masked_logits(graph: Any, state: Any, inputs: Array, masks: Array) -> tuple[Array, Array]:
    module = nnx.merge(graph, state)
    blocks, final_norm = module.encoder.params
    ends = np.cumsum([block.num_heads for block in module.encoder.blocks])[:-1]

    def under(mask: Array) -> tuple[Array, Array]:
        masked = [
            mj.EncoderBlockParams(mask_heads(b.attention, kept), b.norm1, b.feed_forward, b.norm2)
            for b, kept in zip(blocks, jnp.split(mask, ends), strict=True)
        ]

        def logits(x: Array) -> tuple[Array, Array]:
            mean, cov = module.encoder.moments(*enter(module, x), (masked, final_norm), None)
            mean, cov = module.stages[-1].moments(mean, cov)
            return mean[0], cov.token_blocks()[0]

        return jax.lax.map(logits, inputs, batch_size=50)

    return jax.lax.map(under, masks)


class HeadImportance(NamedTuple):
    """Importance of each head: (H,) for each block; changes in nats over the data set."""

    fit_change: list[np.ndarray]  # of the ELBO's data term without this head: negative if it helps
    fit_error: list[np.ndarray]  # its standard error; 0 if the inputs given are the data set
    kl_saved: list[np.ndarray]  # what the KL becomes smaller by when its weights are removed
    elbo_change: list[np.ndarray]  # fit_change + kl_weight * kl_saved: positive if it does harm


def head_importance(
    module: Any, inputs: Array, labels: Array, *, dataset_size: int, kl_weight: float = 1.0
) -> HeadImportance:
    """Importance of every head of a classifier, from the posterior.

    The change of the ELBO is exact in the sense that both bounds are recomputed by the analytic pass,
    and the divergences in closed form: no gradient stands in for the change.

    Args:
      module: a `VisionTransformer` of `mj.nn`.
      inputs: (N, ...); the training data, or a random part of it.
      labels: (N,) class indices.
      dataset_size: |D|; the data term is scaled by |D| / N.
      kl_weight: the weight of the KL divergence that the module was trained with.
    """
    count = int(jnp.shape(inputs)[0])
    if not 2 <= count <= dataset_size:
        raise ValueError(
            f"`head_importance` needs 2 <= N <= dataset_size. Got N={count} and {dataset_size}."
        )
    blocks = blocks_of(module).blocks
    heads = [block.num_heads for block in blocks]
    every = np.eye(sum(heads) + 1, sum(heads), -1, dtype=bool)
    means, covs = head_predictions(module, inputs, ~every)  # all heads, then without each
    fit = partial(mj.objectives.expected_log_likelihood, mj.objectives.Categorical())
    fits = jax.jit(jax.vmap(jax.vmap(fit), (None, 0, 0)))(jnp.asarray(labels), means, covs)
    change = dataset_size * np.asarray(fits[1:] - fits[:1], np.float64)
    left_out = 1 - count / dataset_size  # of a finite data set: no error where it is all given
    error = change.std(axis=1, ddof=1) * (left_out / count) ** 0.5
    ends = np.cumsum(heads)[:-1]
    saved = [_kl_of_heads(block.attention, h) for block, h in zip(blocks, heads, strict=True)]
    changes = np.split(change.mean(axis=1), ends)
    return HeadImportance(
        changes,
        np.split(error, ends),
        saved,
        [c + kl_weight * s for c, s in zip(changes, saved, strict=True)],
    )


def _kl_of_heads(layer: Any, num_heads: int) -> np.ndarray:
    """By how much the KL falls without each head: that of its own entries, for they are independent."""
    saved = np.zeros(num_heads)
    beliefs = [(layer.out.kernel, 0)]
    for dense in (layer.query, layer.key, layer.value):
        beliefs += [(belief, -1) for belief in (dense.kernel, dense.bias) if belief is not None]
    for belief, axis in beliefs:
        whole, prior = belief.posterior, belief.prior
        mean, variance = (jnp.split(part, num_heads, axis) for part in (whole.mean, whole.variance))
        for head, own in enumerate(zip(mean, variance, strict=True)):
            saved[head] += float(mj.posterior.Factorized(*own).kl(prior))
    return saved


class HeadCurve(NamedTuple):
    """Scores against the number of heads kept, from all of them down to none."""

    kept: np.ndarray  # (M,) how many heads
    accuracy: np.ndarray  # (M,)
    nll: np.ndarray  # (M,), negative log-likelihood of the labels in nats
    order: list[tuple[int, int]]  # (block, head) pairs in the order in which they were removed


def head_curve(module: Any, inputs: Array, labels: Any, worth: Sequence[np.ndarray]) -> HeadCurve:
    """Accuracy as heads are masked one after the other, the least important first.

    Args:
      module: a `VisionTransformer` of `mj.nn`.
      inputs: (N, ...), images that the worth was not computed from.
      labels: (N,) class indices.
      worth: for each block (H,), such as `-importance.elbo_change`.
    """
    pairs = [(i, h) for i, own in enumerate(worth) for h in range(len(own))]
    removed = np.argsort(np.concatenate(worth), kind="stable")
    # The head in place k of this order is there in the first k + 1 masks.
    masks = np.argsort(removed) >= np.arange(len(pairs) + 1)[:, None]
    means, covs = head_predictions(module, inputs, masks)
    probabilities = jax.jit(jax.vmap(jax.vmap(mj.objectives.class_probabilities)))(means, covs)
    labels = jnp.asarray(labels)
    return HeadCurve(
        masks.sum(axis=1),
        np.asarray([mj.objectives.accuracy(p, labels) for p in probabilities]),
        np.asarray([mj.objectives.negative_log_likelihood(p, labels) for p in probabilities]),
        [pairs[i] for i in removed],
    )
