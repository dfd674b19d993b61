"""What a network predicts, from which targets are sampled for the true Fisher matrix."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

Array = jax.Array


@runtime_checkable
class Prediction(Protocol):
    """A predictive distribution of a batch of N examples."""

    @property
    def num_examples(self) -> int:
        """N."""

    def sampled_loss(self, key: Array) -> Array:
        """sum_n -log p(y_n), nats, with y_n drawn from the prediction itself and held fixed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CategoricalPrediction:
    """Classes with these logits.

    Args:
      logits: (N, ..., C); axes between are further targets of the same example, tokens for instance.
    """

    logits: Array

    @property
    def num_examples(self) -> int:
        """N."""
        return self.logits.shape[0]

    def sampled_loss(self, key: Array) -> Array:
        """Cross-entropy with sampled labels, summed over all targets."""
        labels = jax.random.categorical(key, jax.lax.stop_gradient(self.logits))
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(self.logits, labels))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BernoulliPrediction:
    """Independent binary targets with these logits, (N, ...)."""

    logits: Array

    @property
    def num_examples(self) -> int:
        """N."""
        return self.logits.shape[0]

    def sampled_loss(self, key: Array) -> Array:
        """Binary cross-entropy with sampled labels, summed over all targets."""
        labels = jax.random.bernoulli(key, jax.nn.sigmoid(jax.lax.stop_gradient(self.logits)))
        labels = labels.astype(self.logits.dtype)
        return jnp.sum(optax.sigmoid_binary_cross_entropy(self.logits, labels))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalPrediction:
    """Independent Gaussian targets.

    Args:
      mean: (N, ...).
      scale: their standard deviation, a number. The squared error 1/2 |y - mean|^2 of an example has
        scale 1; an average of squares over D outputs is (2/D) times that, hence scale sqrt(D / 2).
    """

    mean: Array
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    @property
    def num_examples(self) -> int:
        """N."""
        return self.mean.shape[0]

    def sampled_loss(self, key: Array) -> Array:
        """1/2 |(y - mean) / scale|^2 with sampled y, summed over all targets."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        target = jax.lax.stop_gradient(self.mean) + self.scale * noise
        return jnp.sum((target - self.mean) ** 2) / (2 * self.scale**2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BayesianCategoricalPrediction:
    """Classes whose logits are Gaussian, what a Bayesian classifier of `mj.nn` returns.

    A label is drawn in two steps, logits from their Gaussian and the class from those; -log p is that of
    the class given the drawn logits, differentiated through the mean of the logits alone. Its outer
    product averages to E_q[J^T H(f) J], the curvature of the expected log-likelihood.

    Args:
      mean: (N, C).
      cov: (N, C, C).
    """

    mean: Array
    cov: Array

    @property
    def num_examples(self) -> int:
        """N."""
        return self.mean.shape[0]

    def sampled_loss(self, key: Array) -> Array:
        """Cross-entropy with sampled logits and labels, summed over examples."""
        logit_key, label_key = jax.random.split(key)
        mean, cov = (jax.lax.stop_gradient(x) for x in (self.mean, self.cov))
        values, vectors = jnp.linalg.eigh(cov)
        noise = jax.random.normal(logit_key, mean.shape, mean.dtype) * jnp.sqrt(
            jnp.maximum(values, 0)
        )
        shift = jnp.einsum("nij,nj->ni", vectors, noise)
        labels = jax.random.categorical(label_key, mean + shift)
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(self.mean + shift, labels))
