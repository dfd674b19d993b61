"""The protocol's network: moments of its outputs, and its outputs at given weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.draws import Arrays

Params = dict[str, Any]
"""`beliefs`, the state of the Bayesian module, and `log_noise`, of the noise variance."""

HIDDEN = 50
RELATIVE_SCALE = 0.03  # spreads begin small, or units are pruned before they have learned anything
START_LOG_NOISE = -1.0


@dataclasses.dataclass(frozen=True)
class Perceptron:
    """One hidden layer of 50 ReLU units, without its parameters."""

    num_features: int  # D
    num_outputs: int  # O: 1, the mean, or 2, the mean and the logarithm of the noise variance

    def build(self, key: Array) -> mj.nn.MLP:
        """A new module."""
        sizes = [self.num_features, HIDDEN, self.num_outputs]
        return mj.nn.MLP(
            sizes, structure=mj.Diagonal, relative_scale=RELATIVE_SCALE, rngs=nnx.Rngs(key)
        )

    def start(self, key: Array) -> Params:
        """The parameters before the first update."""
        beliefs = nnx.split(self.build(key))[1]
        return {"beliefs": beliefs, "log_noise": jnp.asarray(START_LOG_NOISE)}

    def module(self, params: Params) -> Any:
        """The Bayesian module with these parameters."""
        graph = nnx.split(nnx.eval_shape(lambda: self.build(jax.random.key(0))))[0]
        return nnx.merge(graph, params["beliefs"])

    def moments(self, module: Any, x: Array) -> tuple[Array, Array]:
        """Rows (N, D) -> mean (N, O) and covariance (N, O, O) of the outputs.

        Hidden units are independent where the input is certain, so this drops nothing.
        """
        first, last = module.params
        hidden, cov = mj.relu(*mj.dense(x, mj.Diagonal.zeros((len(x), self.num_features)), first))
        mean, own = mj.dense(hidden, cov, last)
        shared = jnp.einsum("nh,ho,hp->nop", cov.variance(), last.kernel.mean, last.kernel.mean)
        same = jnp.eye(mean.shape[1], dtype=bool)
        return mean, jnp.where(same, own.variance()[:, :, None], shared)

    def outputs(self, module: Any) -> Callable[[Arrays, Array], Array]:
        """(weights, x (N, D)) -> outputs (N, O)."""
        return lambda arrays, x: jnp.asarray(module.network(arrays)(x))
