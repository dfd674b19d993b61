"""Importance of heads: signal-to-noise under the posterior, and change of the ELBO without each."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.brownian.pruning import entries_of, marginal, mask_heads, parts_of_heads
from experiments.brownian.stream import blocks_of, enter


def head_signal(module: Any, inputs: Array) -> list[np.ndarray]:
    """Signal-to-noise ratio of every head's share of the attention output: (H,) for each block.

    sum of mean^2 over sum of variance, over inputs, tokens and features, of what the head alone adds to
    the residual stream (through the output kernel, without its bias). The variance is that of the
    weights, and of the tokens that come in; both from one moment pass in the structure of the module, an
    `Encoder` or `VisionTransformer`. A head below one adds more noise than signal; +inf where nothing is
    random.
    """
    blocks_of(module)  # or its error
    rows = _all_signals(*nnx.split(module), jnp.asarray(inputs))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = [np.asarray(s.sum(axis=0)) / np.asarray(n.sum(axis=0)) for s, n in rows]
    return [np.nan_to_num(ratio, nan=0.0, posinf=np.inf) for ratio in ratios]


@partial(jax.jit, static_argnums=0)
def _all_signals(graph: Any, state: Any, inputs: Array) -> list[tuple[Array, Array]]:
    """Sums of squared means and of variances of every head's output, (N, H) each, for each block."""
    module = nnx.merge(graph, state)

    def one(x: Array) -> list[tuple[Array, Array]]:
        mean, cov = enter(module, x)
        rows = []
        for block in blocks_of(module).blocks:
            params: mj.EncoderBlockParams = block.params
            seen = mean, cov
            if block.norm_first:
                seen = mj.layer_norm(mean, cov, params.norm1, epsilon=block.epsilon)
            own = params.attention
            output = mj.DenseParams(own.output.kernel, None)
            own = mj.AttentionParams(own.query, own.key, own.value, output)
            alone = jax.vmap(partial(_alone, *seen, own, block.num_heads))
            rows.append(alone(jnp.eye(block.num_heads, dtype=mean.dtype)))
            mean, cov = block.moments(mean, cov, params, None)
        return rows

    return jax.lax.map(one, inputs)


def _alone(
    mean: Array, cov: mj.Covariance, params: mj.AttentionParams, num_heads: int, kept: Array
) -> tuple[Array, Array]:
    added, spread = mj.attention(mean, cov, mask_heads(params, kept), num_heads=num_heads)
    return jnp.sum(added**2), jnp.sum(spread.variance())


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
            return mean[0], cov.cov[0, :, 0]

        return jax.lax.map(logits, inputs, batch_size=50)

    return jax.lax.map(under, masks)


class HeadImportance(NamedTuple):
    """Importance of each head: (H,) for each block; changes in nats over the data set."""

    signal: list[np.ndarray]  # `head_signal`
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
        head_signal(module, inputs),
        changes,
        np.split(error, ends),
        saved,
        [c + kl_weight * s for c, s in zip(changes, saved, strict=True)],
    )


@jax.jit
def _kl(belief: Any, prior: Any) -> Array:
    return jnp.asarray(belief.kl(prior))


def _kl_of_heads(layer: Any, num_heads: int) -> np.ndarray:
    """By how much the KL falls without each head: the whole less that of the remaining marginal."""
    saved = np.zeros(num_heads)
    for belief, axis in parts_of_heads(layer):
        whole, prior = belief.posterior, belief.prior
        for head in range(num_heads):
            kept = entries_of(np.arange(num_heads) != head, belief.mean.shape[axis])
            rest = _kl(marginal(whole, kept, axis), prior) if len(kept) else 0.0
            saved[head] += float(_kl(whole, prior)) - float(rest)
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
      worth: for each block (H,), such as `-importance.elbo_change` or `importance.signal`.
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
