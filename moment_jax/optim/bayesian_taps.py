"""Parameter groups of Bayesian layers whose means report their curvature.

The layer's input a is the MEAN of its random input, and g the gradient of the loss with respect to the
MEAN of its output. How the kernel's mean enters the covariance of the output is not part of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from moment_jax.layers import DenseParams, NormParams
from moment_jax.optim.statistics import Statistic, observe

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Observed:
    """Reports inputs and output gradients of the mean of the parameters it is mixed into."""

    statistic: Statistic = dataclasses.field(kw_only=True, metadata={"static": True})
    dummies: dict[str, Array] = dataclasses.field(kw_only=True)

    def mean_output(self, inputs: Array) -> Array:
        """As that of the parameters. One sequence (T, D) is one example."""
        plain: Any = super()
        identity = observe(self.statistic, self.dummies["rows"].dtype)
        output, inputs = plain.mean_output(inputs), jax.lax.stop_gradient(inputs)
        return identity(output[None], inputs[None], self.dummies)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedDense(Observed, DenseParams):
    """`DenseParams`, observed at their inputs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedNorm(Observed, NormParams):
    """`NormParams`, observed at their normalised inputs."""


def observed_params(params: Any, statistic: Statistic, dummies: dict[str, Array]) -> Any:
    """The same beliefs, observed."""
    if isinstance(params, DenseParams):
        return ObservedDense(params.kernel, params.bias, statistic=statistic, dummies=dummies)
    return ObservedNorm(params.scale, params.bias, statistic=statistic, dummies=dummies)
