"""The protocol's network."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj

HIDDEN = 50
RELATIVE_SCALE = 0.03  # spreads begin small, or units are pruned before they have learned anything
START_LOG_NOISE = -1.0


def perceptron(num_features: int, num_outputs: int, key: Array) -> mj.Bayesian:
    """A new model of rows (N, D), of one hidden layer of 50 ReLU units.

    It has one output, the mean, or two, the mean and the logarithm of the noise variance. Hidden units
    are independent, for the input is certain: one output needs variances alone.
    """
    network = mj.nn.MLP([num_features, HIDDEN, num_outputs], rngs=nnx.Rngs(key))
    options: dict[str, Any] = {"structure": mj.Full, "relative_scale": RELATIVE_SCALE}
    if num_outputs == 2:
        return mj.Bayesian(network, mj.objectives.HeteroscedasticGaussian(), **options)
    model = mj.Bayesian(network, mj.Gaussian(), **options | {"structure": mj.Diagonal})
    model.noise.set_value(jnp.asarray(START_LOG_NOISE))
    return model
