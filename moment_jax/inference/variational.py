"""A belief about the weights of any model, trained by the analytic ELBO: steps, scores, moments."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from moment_jax.nn import bayesian
from moment_jax.objectives import (
    Categorical,
    Gaussian,
    expected_log_likelihood,
    kl_warmup,
    log_marginal,
)
from moment_jax.posterior import Factorized

Array = jax.Array
STEPS_AT_ONCE = 50  # compiled as one program


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a compiled step depends on beside the shapes of its arrays.

    Args:
      graph: of the model.
      structure: in which moments are kept.
      likelihood: its type, Categorical or Gaussian.
      learn_noise: whether the noise variance is learned.
      kl_weight: of the ELBO, after the warm-up.
      warm_up: steps in which the weight of the KL rises.
    """

    graph: Any
    structure: Any
    likelihood: type
    learn_noise: bool
    kl_weight: float
    warm_up: int


class Belief(NamedTuple):
    """What is learned: independent Gaussian weights, and the noise."""

    mean: Any
    log_scale: Any
    log_noise: Array  # (D,), of the variance


class Training(NamedTuple):
    """A point of the training."""

    belief: Belief
    optimizer: Any
    step: Array


def start(params: Any, relative_scale: float, log_noise: Array) -> Training:
    """At the model's own weights, with standard deviations relative to those of each array."""

    def scale(w: Array) -> Array:
        size = jnp.maximum(jnp.sqrt(jnp.mean(w**2)), 0.1)
        return jnp.full(w.shape, jnp.log(relative_scale * size), w.dtype)

    belief = Belief(params, jax.tree.map(scale, params), log_noise)
    return Training(belief, optax.adam(1.0).init(belief), jnp.zeros((), jnp.int32))


def posterior(belief: Belief) -> Any:
    """The tree of beliefs."""
    return jax.tree.map(lambda m, s: Factorized(m, jnp.exp(2 * s)), belief.mean, belief.log_scale)


def kl(belief: Belief) -> Array:
    """KL to priors N(0, s^2), one s for each array, at the s^2 that is best: mean of m^2 + variance."""
    total = jnp.zeros(())
    for mean, log_scale in zip(
        jax.tree.leaves(belief.mean), jax.tree.leaves(belief.log_scale), strict=True
    ):
        best = jnp.mean(mean**2 + jnp.exp(2 * log_scale))
        total += 0.5 * mean.size * jnp.log(best) - jnp.sum(log_scale)
    return total


def moments(spec: Spec, belief: Belief, frame: Any, inputs: Any) -> tuple[Array, Array]:
    """Of the model's outputs, (N, D) and (N, D, D).

    Args:
      spec: what the program depends on.
      belief: about the weights.
      frame: parameters, for their places alone, and the rest of the model.
      inputs: a tuple of arrays (N, ...).
    """
    params, rest = jax.tree.map(lambda x: x, frame)
    nnx.replace_by_pure_dict(params, belief.mean)
    model: Any = nnx.merge(spec.graph, params, rest)
    mean, cov = bayesian(model, posterior(belief), structure=spec.structure)(*inputs)
    if mean.ndim != 2:
        raise ValueError(
            f"`fit` needs a model with outputs (N, D), one row an example. Got {mean.shape}. For "
            "sequences, write the ELBO with mj.bayesian and mj.objectives.elbo."
        )
    return mean, jax.vmap(lambda c: c.to_dense()[0, :, 0, :])(cov)


def _likelihood(spec: Spec, belief: Belief) -> Any:
    if spec.likelihood is Categorical:
        return Categorical()
    log_noise = belief.log_noise
    return Gaussian(jnp.exp(log_noise if spec.learn_noise else jax.lax.stop_gradient(log_noise)))


@partial(jax.jit, static_argnums=0)
def train(
    spec: Spec, state: Training, frame: Any, inputs: Any, targets: Array, size: Array, rate: Array
) -> tuple[Training, Array]:
    """`STEPS_AT_ONCE` steps of Adam on -ELBO / size; batches have a leading axis of steps.

    Returns:
      The new state, and the average of -ELBO / size in nats.
    """
    optimizer = optax.adam(rate)

    def loss(belief: Belief, inputs: Any, targets: Array, step: Array) -> Array:
        mean, cov = moments(spec, belief, frame, inputs)
        fit = jax.vmap(expected_log_likelihood, (None, 0, 0, 0))(
            _likelihood(spec, belief), targets, mean, cov
        )
        weight = spec.kl_weight * kl_warmup(step, spec.warm_up)
        return -jnp.mean(fit) + weight * kl(belief) / size

    def one(state: Training, batch: Any) -> tuple[Training, Array]:
        value, gradient = jax.value_and_grad(loss)(state.belief, *batch, state.step)
        updates, opt = optimizer.update(gradient, state.optimizer, state.belief)
        belief: Any = optax.apply_updates(state.belief, updates)
        return Training(belief, opt, state.step + 1), value

    state, values = jax.lax.scan(one, state, (inputs, targets))
    return state, jnp.mean(values)


@partial(jax.jit, static_argnums=0)
def predict(spec: Spec, belief: Belief, frame: Any, inputs: Any) -> tuple[Array, Array]:
    """`moments`, compiled."""
    return moments(spec, belief, frame, inputs)


@partial(jax.jit, static_argnums=0)
def score(spec: Spec, belief: Belief, targets: Array, mean: Array, cov: Array) -> Array:
    """Log predictive density of each target, (N,), in nats."""
    return jax.vmap(log_marginal, (None, 0, 0, 0))(_likelihood(spec, belief), targets, mean, cov)
