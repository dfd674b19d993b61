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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedDense(DenseParams):
    """`DenseParams` that report inputs and output gradients of their mean."""

    statistic: Statistic = dataclasses.field(kw_only=True, metadata={"static": True})
    dummies: dict[str, Array] = dataclasses.field(kw_only=True)

    def mean_output(self, mean: Array) -> Array:
        """As `DenseParams.mean_output`."""
        return _observed(self, super().mean_output(mean), mean)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedNorm(NormParams):
    """`NormParams` that report normalised inputs and output gradients of their mean."""

    statistic: Statistic = dataclasses.field(kw_only=True, metadata={"static": True})
    dummies: dict[str, Array] = dataclasses.field(kw_only=True)

    def mean_output(self, normal: Array) -> Array:
        """As `NormParams.mean_output`."""
        return _observed(self, super().mean_output(normal), normal)


def observed_params(params: Any, statistic: Statistic, dummies: dict[str, Array]) -> Any:
    """The same beliefs, observed."""
    if isinstance(params, DenseParams):
        return ObservedDense(params.kernel, params.bias, statistic=statistic, dummies=dummies)
    return ObservedNorm(params.scale, params.bias, statistic=statistic, dummies=dummies)


def _observed(params: Any, output: Array, inputs: Array) -> Array:
    """One sequence (T, D) is one example."""
    identity = observe(params.statistic, params.dummies["rows"].dtype)
    inputs = jax.lax.stop_gradient(inputs)
    return identity(output[None], inputs[None], params.dummies)[0]
