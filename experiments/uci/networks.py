"""The network of the protocol: moments of its outputs, and its outputs at given weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import moment_jax as mj
from experiments.draws import Arrays

Array = jax.Array
Params = dict[str, Any]
"""`beliefs`, the state of the Bayesian module, and `log_noise`, of the noise variance."""

HIDDEN = 50
RELATIVE_SCALE = 0.03  # spreads begin small, or units are pruned before they have learned anything
START_LOG_NOISE = -1.0


@dataclasses.dataclass(frozen=True)
class Network:
    """A module without its parameters, and what may be asked of it.

    Args:
      graph: of the Flax module.
      num_outputs: 1, the mean, or 2, the mean and the logarithm of the noise variance.
      state: random streams -> the first state of the module.
      moments: (module, x (N, D)) -> mean (N, O) and covariance (N, O, O) of the outputs.
    """

    graph: Any
    num_outputs: int
    state: Callable[[Array], Any]
    moments: Callable[[Any, Array], tuple[Array, Array]]

    def start(self, key: Array) -> Params:
        """The parameters before the first update."""
        return {"beliefs": self.state(key), "log_noise": jnp.asarray(START_LOG_NOISE)}

    def module(self, params: Params) -> Any:
        """The Bayesian module with these parameters."""
        return nnx.merge(self.graph, params["beliefs"])

    def outputs(self, module: Any) -> Callable[[Arrays, Array], Array]:
        """(weights, x (N, D)) -> outputs (N, O)."""
        return lambda arrays, x: module.network(arrays)(x)


def perceptron(num_features: int, num_outputs: int) -> Network:
    """One hidden layer of 50 ReLU units."""

    def build(key: Array) -> mj.nn.MLP:
        sizes = [num_features, HIDDEN, num_outputs]
        return mj.nn.MLP(
            sizes, structure=mj.Diagonal, relative_scale=RELATIVE_SCALE, rngs=nnx.Rngs(key)
        )

    graph, _ = nnx.split(build(jax.random.key(0)))
    return Network(graph, num_outputs, lambda key: nnx.split(build(key))[1], _perceptron_moments)


def _perceptron_moments(module: mj.nn.MLP, x: Array) -> tuple[Array, Array]:
    """Hidden units are independent where the input is certain, so this drops nothing."""
    first, last = module.params
    hidden, cov = mj.relu(*mj.dense(x, mj.Diagonal.zeros((x.shape[0], x.shape[1]), x.dtype), first))
    mean, own = mj.dense(hidden, cov, last)
    shared = jnp.einsum("nh,ho,hp->nop", cov.variance(), last.kernel.mean, last.kernel.mean)
    same = jnp.eye(mean.shape[1], dtype=bool)
    return mean, jnp.where(same, own.variance()[:, :, None], shared)
