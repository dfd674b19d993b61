"""What a Laplace approximation is given: its data, and the outputs there; checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moment_jax.inference.curvature import Curvature
from moment_jax.inference.data import examples
from moment_jax.objectives import Categorical

Array = jax.Array


def checked_data(model: nnx.Module, data: Any) -> tuple[tuple[Array, ...], np.ndarray]:
    """Inputs and targets of as many examples."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`laplace` needs a Flax NNX module. Got {type(model).__name__}.")
    inputs, targets = examples("laplace", data)
    return tuple(map(jnp.asarray, inputs)), np.asarray(targets)


def checked_outputs(
    curvature: Curvature, inputs: Any, targets: np.ndarray, batch_size: int, name: type
) -> np.ndarray:
    """The model's outputs (N, ..., C), which the targets fit."""
    starts = range(0, len(targets), batch_size)
    parts = [curvature.outputs(tuple(x[s : s + batch_size] for x in inputs)) for s in starts]
    outputs = np.concatenate([np.asarray(part, np.float64) for part in parts])
    check_targets(outputs.shape, targets, name)
    return outputs


def check_targets(outputs: tuple[int, ...], targets: np.ndarray, name: type) -> None:
    """That targets are of the shape and the classes of outputs (N, ..., C)."""
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
