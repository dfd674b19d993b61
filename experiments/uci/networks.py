"""The protocol's network."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj

Params = dict[str, Any]
"""`beliefs`, the state of the model, and `log_noise`, of the noise variance."""

HIDDEN = 50
RELATIVE_SCALE = 0.03  # spreads begin small, or units are pruned before they have learned anything
START_LOG_NOISE = -1.0


@dataclasses.dataclass(frozen=True)
class Perceptron:
    """One hidden layer of 50 ReLU units, without its parameters."""

    num_features: int  # D
    num_outputs: int  # O: 1, the mean, or 2, the mean and the logarithm of the noise variance

    def build(self, key: Array) -> mj.Bayesian:
        """A new model of rows (N, D).

        Hidden units are independent, for the input is certain: one output needs variances alone.
        """
        network = mj.nn.MLP([self.num_features, HIDDEN, self.num_outputs], rngs=nnx.Rngs(key))
        structure = mj.Diagonal if self.num_outputs == 1 else mj.Full
        return mj.Bayesian(network, structure=structure, relative_scale=RELATIVE_SCALE)

    def start(self, key: Array) -> Params:
        """The parameters before the first update."""
        beliefs = nnx.split(self.build(key))[1]
        return {"beliefs": beliefs, "log_noise": jnp.asarray(START_LOG_NOISE)}

    def module(self, params: Params) -> mj.Bayesian:
        """The model with these parameters."""
        graph = nnx.split(nnx.eval_shape(lambda: self.build(jax.random.key(0))))[0]
        return nnx.merge(graph, params["beliefs"])
