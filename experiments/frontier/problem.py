"""A network to measure: certain inputs and head, and beliefs about the blocks of a pre-norm encoder."""

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
    """How a posterior is trained by sampled variational inference."""

    kl_weight: float  # weight of the KL divergence: 1 is Bayes' rule, less a cold posterior
    seed: int = 0  # of the initial weights, the mini-batches and the draws
    steps: int = 3000  # updates


@dataclasses.dataclass(frozen=True)
class Spec:
    """Specification of a network."""

    name: str  # unique; what `--networks` takes
    num_blocks: int  # L
    num_tokens: int  # T
    num_features: int  # D; the hidden layers have 4 D
    batch: int  # sequences measured together
    training: Training | None = None  # None for a random posterior
    samples: int = 4000  # the most networks drawn for the truth; the command line may ask for fewer
    num_heads: int = 4  # H

    @property
    def hidden_features(self) -> int:
        """Width of the feed-forward layers."""
        return 4 * self.num_features


COLD, FULL = 0.1, 1.0  # weights of the KL divergence

_ALL = (
    # As small as a network can be: to try the command.
    Spec("random_b1_t4_d8", 1, 4, 8, batch=2),
    # Random posteriors.
    Spec("random_b1_t16_d32", 1, 16, 32, batch=8),
    Spec("random_b1_t64_d128", 1, 64, 128, batch=4, samples=2000),
    Spec("random_b4_t16_d32", 4, 16, 32, batch=8),
    Spec("random_b4_t64_d64", 4, 64, 64, batch=4, samples=2000),
    Spec("random_b12_t16_d32", 12, 16, 32, batch=8, samples=2000),
    Spec("random_b12_t64_d64", 12, 64, 64, batch=4, samples=1000),
    Spec("random_b2_t196_d384", 2, 196, 384, batch=1, samples=200),
    Spec("random_b1_t1024_d128", 1, 1024, 128, batch=1, samples=200),
    Spec("random_b2_t1024_d768", 2, 1024, 768, batch=1, samples=64),
    Spec("random_b12_t196_d384", 12, 196, 384, batch=1, samples=64),
    Spec("random_b12_t196_d768", 12, 196, 768, batch=1, samples=64),
    Spec("random_b12_t1024_d768", 12, 1024, 768, batch=1, samples=32),
    # Trained posteriors: digits in patches of 2 x 2 pixels (T 16) or 1 x 1 (T 64).
    Spec("trained_b1_d32_cold", 1, 16, 32, batch=8, training=Training(COLD)),
    Spec("trained_b2_d32_cold", 2, 16, 32, batch=8, training=Training(COLD)),
    Spec("trained_b2_d32_cold_seed5", 2, 16, 32, batch=8, training=Training(COLD, seed=5)),
    Spec("trained_b2_d32_full", 2, 16, 32, batch=8, training=Training(FULL)),
    Spec("trained_b2_d64_cold", 2, 16, 64, batch=8, training=Training(COLD)),
    Spec("trained_b3_d48_kl0.3", 3, 16, 48, batch=8, training=Training(0.3)),
    Spec("trained_b4_d32_full", 4, 16, 32, batch=8, training=Training(FULL)),
    Spec("trained_b4_d32_cold_seed1", 4, 16, 32, batch=8, training=Training(COLD, seed=1)),
    Spec("trained_b2_d32_t64_cold", 2, 64, 32, batch=4, training=Training(COLD, steps=2000)),
)

NETWORKS = {spec.name: spec for spec in _ALL}
"""All networks by their names, in the order in which they are measured."""

TINY, LARGE = "random_b1_t4_d8", ("t1024", "b12_t196")
DEFAULT = tuple(name for name in NETWORKS if name != TINY and not any(x in name for x in LARGE))
"""Those that are measured if none is named; the others take hours."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A network with its inputs."""

    spec: Spec
    blocks: mj.EncoderBlockParams  # beliefs, stacked: every array has a leading axis of L
    head: tuple[np.ndarray, np.ndarray]  # certain: (D, C) and (C,), on the mean over tokens
    inputs: np.ndarray  # (N, T, D), certain
    labels: np.ndarray  # (N,) classes

    def each_block(self) -> list[mj.EncoderBlockParams]:
        """The beliefs block by block."""
        leaves, tree = jax.tree.flatten(self.blocks)
        return [jax.tree.unflatten(tree, each) for each in zip(*leaves, strict=True)]


Make = Callable[..., Any]


def tree_of(
    features: int, hidden: int, kernel: Make, bias: Make, gain: Make
) -> mj.EncoderBlockParams:
    """An encoder block's parameter group, from factories for kernels, biases and gains."""

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
