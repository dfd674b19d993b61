"""The protocol's network."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj

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
        options: dict[str, Any] = {"structure": mj.Full, "relative_scale": RELATIVE_SCALE}
        if self.num_outputs == 2:
            return mj.Bayesian(network, mj.objectives.HeteroscedasticGaussian(), **options)
        model = mj.Bayesian(network, mj.Gaussian(), **options | {"structure": mj.Diagonal})
        model.noise.set_value(jnp.asarray(START_LOG_NOISE))
        return model

    def start(self, key: Array) -> Any:
        """The state of a new model."""
        return nnx.state(self.build(key))
