"""Training a belief about a model's weights by the analytic ELBO: steps, scores, moments."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from moment_jax.nn import bayesian
from moment_jax.objectives import (
    Categorical,
    Gaussian,
    expected_log_likelihood,
    kl_warmup,
    log_marginal,
)
from moment_jax.posterior import Factorized

STEPS_AT_ONCE = 50  # in one compiled program


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a compiled step depends on besides the shapes of its arrays."""

    graph: Any  # of the model
    structure: Any  # of the covariances
    likelihood: type  # Categorical or Gaussian
    learn_noise: bool  # whether to learn the noise variance
    kl_weight: float  # after the warm-up
    warm_up: int  # number of steps over which the KL weight rises


class Belief(NamedTuple):
    """The learned quantities: independent Gaussian weights, and the noise."""

    mean: Any
    log_scale: Any
    log_noise: Array  # log variance, (D,)


class Training(NamedTuple):
    """The state of the training."""

    belief: Belief
    optimizer: Any
    step: Array


def start(params: Any, relative_scale: float, log_noise: Array) -> Training:
    """The initial state: the model's weights, with standard deviations relative to each array's size."""

    def scale(w: Array) -> Array:
        size = jnp.maximum(jnp.sqrt(jnp.mean(w**2)), 0.1)
        return jnp.full(w.shape, jnp.log(relative_scale * size), w.dtype)

    belief = Belief(params, jax.tree.map(scale, params), log_noise)
    return Training(belief, optax.adam(1.0).init(belief), jnp.zeros((), jnp.int32))


def posterior(belief: Belief) -> Any:
    """The belief as a tree of `Factorized`."""
    return jax.tree.map(lambda m, s: Factorized(m, jnp.exp(2 * s)), belief.mean, belief.log_scale)


def kl(belief: Belief) -> Array:
    """KL to priors N(0, s^2), one s per array, at the optimal s^2: the average of mean^2 + variance."""
    total = jnp.zeros(())
    for mean, log_scale in zip(
        jax.tree.leaves(belief.mean), jax.tree.leaves(belief.log_scale), strict=True
    ):
        best = jnp.mean(mean**2 + jnp.exp(2 * log_scale))
        total += 0.5 * mean.size * jnp.log(best) - jnp.sum(log_scale)
    return total


def moments(spec: Spec, belief: Belief, frame: Any, inputs: Any) -> tuple[Array, Array]:
    """Mean and covariance of the model's outputs, (N, D) and (N, D, D).

    The frame is the model's parameters, used for their structure only, and the rest of its state.
    """
    params, rest = jax.tree.map(lambda x: x, frame)
    nnx.replace_by_pure_dict(params, belief.mean)
    model: Any = nnx.merge(spec.graph, params, rest)
    mean, cov = bayesian(model, posterior(belief), structure=spec.structure)(*inputs)
    if mean.ndim != 2:
        raise ValueError(
            f"`fit` needs a model with outputs (N, D), one row per example. Got {mean.shape}. For "
            "sequences, write the ELBO with mj.bayesian and mj.objectives.elbo."
        )
    return mean, jax.vmap(lambda c: c.to_dense()[0, :, 0, :])(cov)


predict = partial(jax.jit, static_argnums=0)(moments)


def _likelihood(spec: Spec, belief: Belief) -> Any:
    if spec.likelihood is Categorical:
        return Categorical()
    log_noise = belief.log_noise
    return Gaussian(jnp.exp(log_noise if spec.learn_noise else jax.lax.stop_gradient(log_noise)))


@partial(jax.jit, static_argnums=0)
def train(
    spec: Spec, state: Training, frame: Any, inputs: Any, targets: Array, size: Array, rate: Array
) -> tuple[Training, Array]:
    """The state after `STEPS_AT_ONCE` Adam steps on -ELBO / size, and its average in nats.

    Batches have a leading axis of steps.
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
def score(spec: Spec, belief: Belief, targets: Array, mean: Array, cov: Array) -> Array:
    """Log predictive density of each target, (N,), in nats."""
    return jax.vmap(log_marginal, (None, 0, 0, 0))(_likelihood(spec, belief), targets, mean, cov)
