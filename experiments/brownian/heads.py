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
from experiments.brownian.stream import blocks_of


def heads_of(model: mj.Bayesian) -> list[int]:
    """The number of heads of each block; TypeError of a model without logits."""
    network = model.at_means()
    owner = blocks_of(network)
    if owner is network:
        raise TypeError(
            "A head's worth needs a model of logits, such as one of mj.nn.VisionTransformer. Got one of "
            f"{model.name}."
        )
    return [block.attention.num_heads for block in owner.blocks]


def attention_weights(model: mj.Bayesian, block: int) -> dict[tuple[str, str], Any]:
    """The weights of the attention of a block, beliefs or certain, such as ("query", "kernel")."""
    flat = nnx.traversals.flatten_mapping(model.weights, is_leaf=lambda _, x: type(x) is not dict)
    owner = "blocks", block, "attention"
    return {path[-2:]: x for path, x in flat.items() if path[-5:-2] == owner}


@nnx.jit
def head_predictions(model: mj.Bayesian, inputs: Array, masks: Array | np.ndarray) -> mj.Moments:
    """Moments (M, N, C) of the logits, under M masks of the heads.

    A head that is left out has queries, keys and values of zero. It enters the output through its values
    alone; queries and keys are taken out with them, because some structures keep one token correlation
    for the queries of all heads. So the moments are those of the model without the head.

    Args:
      model: of a `VisionTransformer` of `mj.nn`, whose attention is `Factorized` or certain.
      inputs: a batch (N, ...).
      masks: (M, heads of all blocks) booleans. One compiled pass serves all of a number.
    """
    heads = heads_of(model)
    if np.shape(masks)[1:] != (sum(heads),):
        raise ValueError(
            f"`head_predictions` needs masks (M, {sum(heads)}), the heads of all blocks. Got "
            f"{np.shape(masks)}."
        )
    graph, state = nnx.split(model)

    def under(mask: Array) -> mj.Moments:
        model: mj.Bayesian = nnx.merge(graph, state, copy=True)  # or it could not be changed here
        for block, kept in enumerate(jnp.split(mask, np.cumsum(heads)[:-1])):
            for (name, _), weight in attention_weights(model, block).items():
                if name == "out":  # queries, keys and values have heads (..., H, K)
                    continue
                zeros: list[Any] = [(weight, 0)]
                if isinstance(weight, mj.nn.Belief):
                    zeros = [(weight.mean, 0), (weight.raw["scale"], -jnp.inf)]
                for part, none in zeros:
                    part.set_value(jnp.where(kept[:, None], part[...], none))

        def logits(x: Array) -> mj.Moments:
            found = model(x[None])
            return jax.tree.map(lambda part: part[0], found._replace(cov=found.features))

        return jax.lax.map(logits, inputs, batch_size=50)

    return jax.lax.map(under, masks)


class HeadImportance(NamedTuple):
    """Importance of each head: (H,) for each block; changes in nats over the data set."""

    fit_change: list[np.ndarray]  # of the ELBO's data term without this head: negative if it helps
    fit_error: list[np.ndarray]  # its standard error; 0 if the inputs given are the data set
    kl_saved: list[np.ndarray]  # what the KL becomes smaller by when its weights are removed
    elbo_change: list[np.ndarray]  # fit_change + kl_weight * kl_saved: positive if it does harm


def head_importance(
    model: mj.Bayesian, inputs: Array, labels: Array, *, dataset_size: int, kl_weight: float = 1.0
) -> HeadImportance:
    """Importance of every head of a classifier, from the posterior.

    The change of the ELBO is exact in the sense that both bounds are recomputed by the analytic pass,
    and the divergences in closed form: no gradient stands in for the change.

    Args:
      model: as for `head_predictions`.
      inputs: (N, ...); the training data, or a random part of it.
      labels: (N,) class indices.
      dataset_size: |D|; the data term is scaled by |D| / N.
      kl_weight: the weight of the KL divergence that the model was trained with.
    """
    count = int(jnp.shape(inputs)[0])
    if not 2 <= count <= dataset_size:
        raise ValueError(
            f"`head_importance` needs 2 <= N <= dataset_size. Got N={count} and {dataset_size}."
        )
    heads = heads_of(model)
    every = np.eye(sum(heads) + 1, sum(heads), -1, dtype=bool)
    means, covs = head_predictions(model, inputs, ~every)  # all heads, then without each
    fit = partial(mj.objectives.expected_log_likelihood, mj.objectives.Categorical())
    fits = jax.jit(jax.vmap(jax.vmap(fit), (None, 0, 0)))(jnp.asarray(labels), means, covs)
    change = dataset_size * np.asarray(fits[1:] - fits[:1], np.float64)
    left_out = 1 - count / dataset_size  # of a finite data set: no error where it is all given
    error = change.std(axis=1, ddof=1) * (left_out / count) ** 0.5
    saved = [_kl_of_heads(attention_weights(model, i), h) for i, h in enumerate(heads)]
    figures = change.mean(axis=1), error, change.mean(axis=1) + kl_weight * np.concatenate(saved)
    changes, errors, bounds = (np.split(one, np.cumsum(heads)[:-1]) for one in figures)
    return HeadImportance(changes, errors, saved, bounds)


def _kl_of_heads(attention: dict[tuple[str, str], Any], num_heads: int) -> np.ndarray:
    """By how much the KL falls without each head: that of its own entries, for they are independent."""
    saved = np.zeros(num_heads)
    for path, belief in attention.items():
        if path == ("out", "bias") or not isinstance(belief, mj.nn.Belief):
            continue
        whole: Any = belief.posterior
        axis = 0 if path[0] == "out" else -2
        mean, variance = (jnp.split(part, num_heads, axis) for part in (whole.mean, whole.variance))
        for head, own in enumerate(zip(mean, variance, strict=True)):
            saved[head] += float(mj.posterior.Factorized(*own).kl(belief.prior))
    return saved


class HeadCurve(NamedTuple):
    """Scores against the number of heads kept, from all of them down to none."""

    kept: np.ndarray  # (M,) how many heads
    accuracy: np.ndarray  # (M,)
    nll: np.ndarray  # (M,), negative log-likelihood of the labels in nats
    order: list[tuple[int, int]]  # (block, head) pairs in the order in which they were removed


def head_curve(
    model: mj.Bayesian, inputs: Array, labels: Any, worth: Sequence[np.ndarray]
) -> HeadCurve:
    """Accuracy as heads are masked one after the other, the least important first.

    Args:
      model: as for `head_predictions`.
      inputs: (N, ...), images that the worth was not computed from.
      labels: (N,) class indices.
      worth: for each block (H,), such as `-importance.elbo_change`.
    """
    pairs = [(i, h) for i, own in enumerate(worth) for h in range(len(own))]
    removed = np.argsort(np.concatenate(worth), kind="stable")
    # The head in place k of this order is there in the first k + 1 masks.
    masks = np.argsort(removed) >= np.arange(len(pairs) + 1)[:, None]
    means, covs = head_predictions(model, inputs, masks)
    probabilities = jax.jit(jax.vmap(jax.vmap(mj.objectives.class_probabilities)))(means, covs)
    labels = jnp.asarray(labels)
    return HeadCurve(
        masks.sum(axis=1),
        np.asarray([mj.objectives.accuracy(p, labels) for p in probabilities]),
        np.asarray([mj.objectives.negative_log_likelihood(p, labels) for p in probabilities]),
        [pairs[i] for i in removed],
    )
