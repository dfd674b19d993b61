"""Data checks of a Laplace approximation, and the prior precision chosen on held-out data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moment_jax.inference.curvature import EXAMPLES_AT_ONCE, Curvature
from moment_jax.inference.data import examples
from moment_jax.nn import bayesian
from moment_jax.objectives import (
    Bernoulli,
    Categorical,
    Gaussian,
    bernoulli_probabilities,
    log_marginal,
)

Array = jax.Array


def checked_data(model: nnx.Module, data: Any) -> tuple[tuple[Array, ...], np.ndarray]:
    """Inputs and targets as arrays; checks the model and the number of examples."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`laplace` needs a Flax NNX module. Got {type(model).__name__}.")
    inputs, targets = examples("laplace", data)
    return tuple(map(jnp.asarray, inputs)), np.asarray(targets)


def checked_outputs(
    curvature: Curvature, inputs: Any, targets: np.ndarray, batch_size: int, name: type
) -> np.ndarray:
    """The model's outputs (N, ..., C); checks the targets against them."""
    outputs = curvature.outputs(inputs, batch_size)
    check_targets(outputs.shape, targets, name)
    return outputs


def check_targets(outputs: tuple[int, ...], targets: np.ndarray, name: type) -> None:
    """Raise unless the targets have the shape and classes of outputs (N, ..., C)."""
    wanted = outputs[:-1] if name is Categorical else outputs
    if len(outputs) < 2 or targets.shape != wanted:
        raise ValueError(
            f"`laplace` with {name.__name__} and outputs of shape {outputs} needs targets of "
            f"shape {wanted}. Got {targets.shape}."
        )
    if name is Categorical:
        classes = outputs[-1]
        whole = np.issubdtype(targets.dtype, np.integer)
        if not whole or targets.min() < 0 or targets.max() >= classes:
            raise ValueError(
                f"`laplace` with Categorical needs integer targets from 0 to {classes - 1}. Got "
                f"{targets.dtype} from {targets.min()} to {targets.max()}."
            )


PRECISIONS = np.logspace(-2, 6, 17)


def best_precision(
    model: nnx.Module, likelihood: type, held_out: Any, at: Callable[[float], Any]
) -> float:
    """The precision in `PRECISIONS` whose belief has the highest predictive density on held-out data.

    Args:
      model: the model.
      likelihood: its type, Categorical, Bernoulli or Gaussian.
      held_out: inputs and targets.
      at: maps a precision to the belief and its receipt.
    """
    inputs, targets = checked_data(model, held_out)
    outputs = jax.eval_shape(lambda: model(*inputs))
    shape = outputs.shape
    check_targets(shape, targets, likelihood)
    wanted = jnp.asarray(targets, None if likelihood is Categorical else outputs.dtype)

    @jax.jit
    def score(belief: Any, noise: Array) -> Array:
        def of_example(example: Any) -> Array:
            given, target = example
            mean, cov = bayesian(model, belief, linearised=True)(*(x[None] for x in given))
            blocks = jax.vmap(lambda c: c.token_blocks())(cov)[0]
            mean = mean.reshape(blocks.shape[:2])
            target = target.reshape(len(mean), *target.shape[len(shape) - 2 :])
            return jnp.sum(jax.vmap(_log_density(likelihood, noise))(target, mean, blocks))

        return jnp.sum(jax.lax.map(of_example, (inputs, wanted), batch_size=EXAMPLES_AT_ONCE))

    def density(precision: float) -> float:
        belief, receipt = at(precision)
        noise = 1.0 if receipt.noise_variance is None else receipt.noise_variance
        return float(score(belief, jnp.asarray(noise)))

    densities = np.nan_to_num([density(p) for p in PRECISIONS], nan=-np.inf)
    return float(PRECISIONS[np.argmax(densities)])


def _log_density(likelihood: type, noise: Array) -> Callable[[Array, Array, Array], Array]:
    if likelihood is Bernoulli:

        def of_bits(target: Array, mean: Array, cov: Array) -> Array:
            p = bernoulli_probabilities(mean, jnp.diagonal(cov))
            return jnp.sum(jnp.log(jnp.where(target > 0.5, p, 1 - p)))

        return of_bits
    kind = Categorical() if likelihood is Categorical else Gaussian(noise)
    return lambda target, mean, cov: log_marginal(kind, target, mean, cov)
