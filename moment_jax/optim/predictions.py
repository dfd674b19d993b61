"""Predictive distributions and the two Fisher matrices: sampled targets, or those of the data."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax import Array


@dataclasses.dataclass(frozen=True)
class SampledFisher:
    """The true Fisher matrix, of targets drawn from the prediction that the loss function returns."""


@dataclasses.dataclass(frozen=True)
class EmpiricalFisher:
    """Outer products of the loss's own gradients: no second backward pass.

    Warning: this is not the Fisher matrix. Where the model fits well the gradients vanish, and with them
    the curvature that should bound the step. Use it for comparison, or for losses without a predictive
    distribution. The loss must be an average over the batch, the first axis of its first array.
    """


Fisher = SampledFisher | EmpiricalFisher


@runtime_checkable
class Prediction(Protocol):
    """A predictive distribution of a batch of N examples."""

    @property
    def num_examples(self) -> int:
        """N."""

    def sampled_loss(self, key: Array) -> Array:
        """sum_n -log p(y_n), nats, with y_n drawn from the prediction and held fixed."""


class _OfArrays:
    """A prediction whose arrays all have the examples as their first axis."""

    @property
    def num_examples(self) -> int:
        """N."""
        return jax.tree.leaves(self)[0].shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CategoricalPrediction(_OfArrays):
    """Classes with these logits (N, ..., C); axes in between are further targets, such as tokens."""

    logits: Array

    def sampled_loss(self, key: Array) -> Array:
        """Cross-entropy with sampled labels, summed over all targets."""
        labels = jax.random.categorical(key, jax.lax.stop_gradient(self.logits))
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(self.logits, labels))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BernoulliPrediction(_OfArrays):
    """Independent binary targets with these logits, (N, ...)."""

    logits: Array

    def sampled_loss(self, key: Array) -> Array:
        """Binary cross-entropy with sampled labels, summed over all targets."""
        labels = jax.random.bernoulli(key, jax.nn.sigmoid(jax.lax.stop_gradient(self.logits)))
        labels = labels.astype(self.logits.dtype)
        return jnp.sum(optax.sigmoid_binary_cross_entropy(self.logits, labels))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalPrediction(_OfArrays):
    """Independent Gaussian targets.

    Args:
      mean: (N, ...).
      scale: their standard deviation. For the squared error 1/2 |y - mean|^2 it is 1; for the mean
        squared error over D outputs, sqrt(D / 2).
    """

    mean: Array
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    def sampled_loss(self, key: Array) -> Array:
        """1/2 |(y - mean) / scale|^2 with sampled y, summed over all targets."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        target = jax.lax.stop_gradient(self.mean) + self.scale * noise
        return jnp.sum((target - self.mean) ** 2) / (2 * self.scale**2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BayesianCategoricalPrediction(_OfArrays):
    """Classes with Gaussian logits, whose moments a Bayesian classifier returns.

    Logits are drawn first, then a class given the logits; the loss is -log p of that class, with a
    gradient through the mean of the logits only. The average outer product of that gradient is
    E_q[J^T H(f) J], the curvature of the expected log-likelihood.

    Args:
      mean: (N, C).
      cov: (N, C, C).
    """

    mean: Array
    cov: Array

    def sampled_loss(self, key: Array) -> Array:
        """Cross-entropy with sampled logits and labels, summed over examples."""
        logit_key, label_key = jax.random.split(key)
        mean, cov = (jax.lax.stop_gradient(x) for x in (self.mean, self.cov))
        values, vectors = jnp.linalg.eigh(cov)
        noise = jax.random.normal(logit_key, mean.shape, mean.dtype)
        noise = noise * jnp.sqrt(jnp.maximum(values, 0))
        shift = jnp.einsum("nij,nj->ni", vectors, noise)
        labels = jax.random.categorical(label_key, mean + shift)
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(self.mean + shift, labels))
