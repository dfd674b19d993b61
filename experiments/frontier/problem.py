"""A network to measure: certain inputs and head, and beliefs about the blocks of a pre-norm encoder."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import moment_jax as mj


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

TINY = "random_b1_t4_d8"
DEFAULT = tuple(name for name in NETWORKS if name != TINY)
"""Those that are measured if none is named."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A network with its inputs."""

    spec: Spec
    blocks: mj.EncoderBlockParams  # beliefs, stacked: every array has a leading axis of L
    head: tuple[Array, Array]  # certain: (D, C) and (C,), on the mean over tokens
    inputs: Array  # (N, T, D), certain
    labels: np.ndarray  # (N,) classes

    def each_block(self) -> list[mj.EncoderBlockParams]:
        """The beliefs block by block."""
        return [jax.tree.map(lambda x, i=i: x[i], self.blocks) for i in range(self.spec.num_blocks)]


Make = Callable[..., Any]


def tree_of(spec: Spec, kernel: Make, bias: Make, gain: Make) -> mj.EncoderBlockParams:
    """An encoder block's parameter group, from factories for kernels, biases and gains."""
    features, hidden = spec.num_features, spec.hidden_features

    def dense(into: int, out: int) -> mj.DenseParams:
        return mj.DenseParams(kernel(into, out), bias(out))

    def norm() -> mj.NormParams:
        return mj.NormParams(gain(features), bias(features))

    query, key, value, output = (dense(features, features) for _ in range(4))
    attention, first = mj.AttentionParams(query, key, value, output), norm()
    feed_forward = mj.FeedForwardParams(dense(features, hidden), dense(hidden, features))
    return mj.EncoderBlockParams(attention, first, feed_forward, norm())


def factorized(mean: Any, sd: Any) -> mj.posterior.Factorized:
    """A belief in single precision."""
    mean, sd = jnp.asarray(mean, jnp.float32), jnp.asarray(sd, jnp.float32)
    return mj.posterior.Factorized(mean, sd**2)


RELATIVE_SD = 0.1
NUM_CLASSES = 10
# Spread of the means, and sd, of biases and of gains.
BIAS, BIAS_SD, GAIN, GAIN_SD = 0.02, 0.01, 0.1, 0.1
COMMON, OWN = 0.8, 0.6  # real tokens are alike: a part that they share, and their own


def random_problem(spec: Spec, seed: int) -> Problem:
    """Kernels N(0, 1/fan_in) with sd `RELATIVE_SD / sqrt(fan_in)`; inputs whose tokens are alike."""
    rng = np.random.default_rng([seed, spec.num_blocks, spec.num_tokens, spec.num_features])
    blocks, features = spec.num_blocks, spec.num_features

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def vector(size: int, mean: float, spread: float, sd: float) -> mj.posterior.Factorized:
        return factorized(mean + spread * normal(blocks, size), np.full((blocks, size), sd))

    def kernel(into: int, out: int) -> mj.posterior.Factorized:
        mean = normal(blocks, into, out) / into**0.5
        return factorized(mean, np.full(mean.shape, RELATIVE_SD / into**0.5))

    params = tree_of(
        spec,
        kernel,
        lambda size: vector(size, 0, BIAS, BIAS_SD),
        lambda size: vector(size, 1, GAIN, GAIN_SD),
    )
    common = normal(spec.batch, 1, features)
    inputs = COMMON * common + OWN * normal(spec.batch, spec.num_tokens, features)
    head = jnp.asarray(normal(features, NUM_CLASSES) / np.float32(features**0.5))
    labels = rng.integers(0, NUM_CLASSES, spec.batch).astype(np.int32)
    return Problem(spec, params, (head, jnp.zeros(NUM_CLASSES)), jnp.asarray(inputs), labels)
