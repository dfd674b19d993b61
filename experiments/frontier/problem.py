"""A network to measure: certain inputs and head, and beliefs about the blocks of a pre-norm encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj

EPSILON = 1e-5  # of the normalisations; the case files' value


@dataclasses.dataclass(frozen=True)
class Training:
    """How a posterior is trained by sampled variational inference.

    Args:
      kl_weight: weight of the KL divergence: 1 is Bayes' rule, less a cold posterior.
      seed: of the initial weights, the mini-batches and the draws; the data are split once and for all.
      steps: updates.
    """

    kl_weight: float
    seed: int = 0
    steps: int = 3000


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a network is, before anything is computed.

    Args:
      name: unique; what `--networks` takes.
      num_blocks: L.
      num_tokens: T.
      num_features: D; the hidden layers have 4 D.
      batch: sequences measured together.
      training: None for a random posterior.
      samples: the most networks drawn for the truth; the command line may ask for fewer.
      num_heads: H.
    """

    name: str
    num_blocks: int
    num_tokens: int
    num_features: int
    batch: int
    training: Training | None = None
    samples: int = 4000
    num_heads: int = 4

    @property
    def hidden_features(self) -> int:
        """Width of the feed-forward layers."""
        return 4 * self.num_features

    def described(self) -> str:
        """One line for people."""
        kind = "random posterior"
        if self.training is not None:
            kind = f"trained, KL weight {self.training.kl_weight:g}, seed {self.training.seed}"
        return (
            f"{self.num_blocks} blocks, T {self.num_tokens}, D {self.num_features}, "
            f"batch {self.batch}, {kind}"
        )


@dataclasses.dataclass(frozen=True)
class Problem:
    """A network with its inputs.

    Args:
      spec: what it is.
      blocks: beliefs about all blocks, stacked: every array has a leading axis of L.
      head: certain dense layer on the mean over tokens, kernel (D, C) and bias (C,), as arrays.
      inputs: (N, T, D), certain.
      labels: (N,) classes.
    """

    spec: Spec
    blocks: mj.EncoderBlockParams
    head: tuple[np.ndarray, np.ndarray]
    inputs: np.ndarray
    labels: np.ndarray

    def each_block(self) -> list[mj.EncoderBlockParams]:
        """The beliefs block by block."""
        leaves, tree = jax.tree.flatten(self.blocks)
        return [jax.tree.unflatten(tree, each) for each in zip(*leaves, strict=True)]


Make = Callable[..., Any]


def tree_of(
    features: int, hidden: int, kernel: Make, bias: Make, gain: Make
) -> mj.EncoderBlockParams:
    """An encoder block's group with what these make of (in, out), of a bias' size, of a gain's size."""

    def dense(into: int, out: int) -> mj.DenseParams:
        return mj.DenseParams(kernel(into, out), bias(out))

    def norm() -> mj.NormParams:
        return mj.NormParams(gain(features), bias(features))

    square = features, features
    return mj.EncoderBlockParams(
        mj.AttentionParams(dense(*square), dense(*square), dense(*square), dense(*square)),
        norm(),
        mj.FeedForwardParams(dense(features, hidden), dense(hidden, features)),
        norm(),
    )


def factorized(mean: Any, sd: Any) -> mj.posterior.Factorized:
    """A belief in single precision."""
    return mj.posterior.Factorized(
        jnp.asarray(mean, jnp.float32), jnp.asarray(sd, jnp.float32) ** 2
    )


def from_unconstrained(means: Any, raws: Any) -> Any:
    """Beliefs with the means of one tree, and softplus of the other's leaves as sds."""
    return jax.tree.map(
        lambda mean, raw: mj.posterior.Factorized(mean, jax.nn.softplus(raw) ** 2), means, raws
    )
