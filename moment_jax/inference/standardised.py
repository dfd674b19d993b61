"""Columns in their own units: their means and standard deviations, and a network that knows them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.objectives import HeteroscedasticGaussian


class Standardised(nnx.Module):
    """A network for columns in their own units: its inputs are standardised, its outputs scaled back.

    Args:
      network: any network; it is shared, not copied.
      inputs: mean and standard deviation of each input's columns, or None for an input as it is.
      outputs: those of the targets, or None.
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
