"""Columns in their own units: their means and standard deviations, and a network that knows them."""

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.inference.data import REAL, outputs_of
from moment_jax.inference.laplace_approximation import log_likelihood
from moment_jax.objectives import HeteroscedasticGaussian


class Standardised(nnx.Module):
    """A network for columns in their own units: its inputs are standardised, its outputs scaled back.

    The network is shared, not copied. `inputs` are mean and standard deviation of each input's columns,
    or None for an input as it is, `outputs` those of the targets, or None.
    """

    def __init__(self, network: nnx.Module, inputs: Any, outputs: Any) -> None:
        self.network = network
        constants = jax.tree.map(lambda x: nnx.Variable(jnp.asarray(x)), (tuple(inputs), outputs))
        self.inputs, self.outputs = map(nnx.data, constants)

    def __call__(self, *inputs: Any, **options: Any) -> Array:
        """The network's output, in the targets' units."""
        pairs = zip(inputs, self.inputs, strict=True)
        scaled = [x if of is None else (x - of[0][...]) / of[1][...] for x, of in pairs]
        found: Any = self.network
        output = found(*scaled, **options)
        return output if self.outputs is None else self.outputs[0] + self.outputs[1] * output


def columns(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each feature (..., D), the latter 1 for a constant."""
    rows = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    sd = rows.std(axis=0)
    sd = np.where(sd > 1e-7 * np.abs(rows).max(axis=0), sd, 1.0)
    return rows.mean(axis=0).astype(np.float32), sd.astype(np.float32)


def of_outputs(likelihood: Any, centre: np.ndarray, spread: np.ndarray) -> tuple[Any, Any]:
    """Mean and standard deviation that bring outputs to the units of the targets, the log noise too."""
    if not isinstance(likelihood, HeteroscedasticGaussian):
        return centre, spread
    return np.append(centre, 2 * np.log(spread)), np.append(spread, np.ones_like(spread))


def columns_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Those of an input if it is a table of real columns (N, D), else None."""
    return columns(x) if x.ndim == 2 and x.dtype.kind == "f" else None


def brought_along(
    network: nnx.Module, likelihood: Any, inputs: tuple[np.ndarray, ...], targets: np.ndarray,
    of_inputs: Any, of_outputs: Any,
) -> nnx.Module:  # fmt: skip
    """The network for standard units: of one that was trained in the columns' own, a copy that agrees.

    It is trained if it predicts better than the targets' mean and than in standard units. Its first and
    last dense layers then take the units, if `standardised(copy)(x) == network(x)`.
    """
    rows = np.linspace(0, len(targets) - 1, min(len(targets), 500)).astype(int)
    raw, y = tuple(x[rows] for x in inputs), targets[rows]
    own, known = outputs_of(network, raw), [of for of in of_inputs if of is not None]
    centre, spread = of_outputs or (0.0, 1.0)

    def misfit(outputs: np.ndarray) -> Any:
        if isinstance(likelihood, REAL):
            return np.mean(((outputs[..., : y.shape[-1]] - y) / y.std(axis=0)) ** 2)
        chance = -len(y) * np.log(max(2, own.shape[-1]))
        return log_likelihood(likelihood, outputs, y, 1.0) / chance

    def started(network: nnx.Module) -> np.ndarray:
        return outputs_of(Standardised(network, of_inputs, of_outputs), raw)

    params = [path for path, _ in nnx.to_flat_state(nnx.state(network, nnx.Param))]
    with np.errstate(all="ignore"):
        if not params or not misfit(own) < 0.9 * min(misfit(started(network)), 1.0):
            return network
    layers = [path[:-1] for path in params if path[-1] == "kernel"]
    for first, last in itertools.product(layers if len(known) == 1 else [()], layers):
        copy = nnx.clone(network)
        at: Any = dict(nnx.to_flat_state(nnx.state(copy, nnx.Param)))
        try:
            for mean, sd in known:
                kernel, bias = (at[(*first, name)] for name in ("kernel", "bias"))
                bias.set_value(bias + mean @ kernel[...])
                kernel.set_value(sd[:, None] * kernel)
            kernel, bias = (at[(*last, name)] for name in ("kernel", "bias"))
            bias.set_value((bias - centre) / spread)
            kernel.set_value(kernel / spread)
            if np.abs(started(copy) - own).max() < 0.01 * own.std():
                return copy
        except (KeyError, TypeError, ValueError):  # no bias, or other sizes
            continue
    message = "found no dense layers for the units of this trained network: it starts anew"
    warnings.warn(f"`fit` {message}. Standardise the columns yourself.", stacklevel=5)
    return network
