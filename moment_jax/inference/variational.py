"""The analytic ELBO of independent Gaussian weights: its training steps, and what a belief predicts."""

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
from moment_jax.objectives.moments import logits_cov
from moment_jax.posterior import Factorized


class Belief(NamedTuple):
    """The learned quantities: independent Gaussian weights, and the noise."""

    mean: Any
    log_scale: Any
    log_noise: Array  # log variance, (D,)

    def posterior(self) -> Any:
        """The belief as a tree of `Factorized`."""
        mean, log_scale = nnx.to_pure_dict(self.mean), nnx.to_pure_dict(self.log_scale)
        return jax.tree.map(lambda m, s: Factorized(m, jnp.exp(2 * s)), mean, log_scale)

    def kl(self) -> Array:
        """KL to priors N(0, s^2), one s per array, at the best s^2: the average of mean^2 + variance."""
        total = jnp.zeros(())
        for mean, log_scale in zip(*map(jax.tree.leaves, self[:2]), strict=True):
            best = jnp.mean(mean**2 + jnp.exp(2 * log_scale))
            total += 0.5 * mean.size * jnp.log(best) - jnp.sum(log_scale)
        return total


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


@dataclasses.dataclass(frozen=True)
class Objective:
    """What the compiled programs depend on besides the shapes of their arrays.

    `rest` is the state of the model besides its parameters.
    """

    graph: Any  # of the model
    structure: Any  # of the covariances
    likelihood: type  # Categorical or Gaussian
    learn_noise: bool
    kl_weight: float  # after the warm-up
    warm_up: int  # number of steps over which the KL weight rises

    @partial(jax.jit, static_argnums=0)
    def moments(self, belief: Belief, rest: Any, inputs: Any) -> tuple[Array, Array]:
        """Mean (N, D) of the model's outputs, and covariance (N, D, D); (N, D) in `Diagonal`."""
        model: Any = nnx.merge(self.graph, belief.mean, rest, copy=True)
        mean, cov = bayesian(model, belief.posterior(), structure=self.structure)(*inputs)
        return mean, logits_cov("fit", mean, cov)

    def num_outputs(self, params: Any, rest: Any, inputs: Any) -> int:
        """D of the model's outputs (N, D)."""
        call = partial(nnx.merge, self.graph, copy=True)
        one = jax.tree.map(lambda x: x[:1], inputs)
        output = jax.eval_shape(lambda: call(params, rest)(*one))
        shape: Any = getattr(output, "shape", type(output).__name__)
        if len(shape) != 2 or shape[0] != 1:
            raise ValueError(
                f"`fit` needs a model with outputs (N, D), one row per example. Got {shape} for one "
                "example. For sequences, write the ELBO with mj.bayesian and mj.objectives.elbo."
            )
        num_outputs: int = shape[1]
        return num_outputs

    def _of_each(self, fn: Any, belief: Belief, rest: Any, inputs: Any, targets: Array) -> Array:
        """`fn` of the likelihood, and of each example's target, mean and covariance, (N,)."""
        likelihood: Any = Categorical()
        if self.likelihood is Gaussian:
            log_noise = belief.log_noise
            known = log_noise if self.learn_noise else jax.lax.stop_gradient(log_noise)
            likelihood = Gaussian(jnp.exp(known))
        moments = self.moments(belief, rest, inputs)
        return jax.vmap(fn, (None, 0, 0, 0))(likelihood, targets, *moments)

    @partial(jax.jit, static_argnums=0)
    def log_densities(self, belief: Belief, rest: Any, inputs: Any, targets: Array) -> Array:
        """Log predictive density of each target, (N,), in nats."""
        return self._of_each(log_marginal, belief, rest, inputs, targets)

    @partial(jax.jit, static_argnums=0)
    def train(
        self, state: Training, rest: Any, inputs: Any, targets: Array, size: Array, rate: Array
    ) -> tuple[Training, Array]:
        """The state after an Adam step on -ELBO / size for each batch, and its average in nats.

        Batches have a leading axis of steps.
        """
        optimizer = optax.adam(rate)

        def loss(belief: Belief, inputs: Any, targets: Array, step: Array) -> Array:
            fit = self._of_each(expected_log_likelihood, belief, rest, inputs, targets)
            weight = self.kl_weight * kl_warmup(step, self.warm_up)
            return -jnp.mean(fit) + weight * belief.kl() / size

        def one(state: Training, batch: Any) -> tuple[Training, Array]:
            value, gradient = jax.value_and_grad(loss)(state.belief, *batch, state.step)
            updates, opt = optimizer.update(gradient, state.optimizer, state.belief)
            belief: Any = optax.apply_updates(state.belief, updates)
            return Training(belief, opt, state.step + 1), value

        state, values = jax.lax.scan(one, state, (inputs, targets))
        return state, jnp.mean(values)
