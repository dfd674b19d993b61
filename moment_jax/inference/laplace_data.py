"""What a Laplace approximation is given: its likelihood, its data, the outputs there; checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moment_jax.inference.curvature import LIKELIHOODS, Curvature
from moment_jax.objectives import Categorical, Gaussian

Array = jax.Array
KINDS = ("kfac", "diagonal", "last_layer")


def checked_likelihood(likelihood: Any, kind: str) -> tuple[type, float | None]:
    """The likelihood's type, and the noise variance where it is given."""
    if kind not in KINDS:
        raise ValueError(f"`laplace` needs a kind, one of {', '.join(KINDS)}. Got {kind!r}.")
    name = likelihood if isinstance(likelihood, type) else type(likelihood)
    if name not in LIKELIHOODS:
        raise TypeError(
            "`laplace` needs Categorical(), Bernoulli() or Gaussian(noise_variance) of "
            f"mj.objectives. Got {likelihood!r}."
        )
    if name is not Gaussian or likelihood is Gaussian:
        return name, None
    if np.ndim(likelihood.noise_variance) != 0 or float(likelihood.noise_variance) <= 0:
        raise ValueError(
            "`laplace` needs one positive noise variance for all outputs. Got "
            f"{likelihood.noise_variance}. Scale the targets to the same noise."
        )
    return name, float(likelihood.noise_variance)


def checked_data(model: nnx.Module, data: Any) -> tuple[tuple[Array, ...], np.ndarray]:
    """Inputs and targets of as many examples."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`laplace` needs a Flax NNX module. Got {type(model).__name__}.")
    if not isinstance(data, tuple) or len(data) != 2:
        raise TypeError(
            f"`laplace` needs data = (inputs, targets). Got {type(data).__name__}. Several inputs go "
            "into a tuple of their own: ((x, mask), targets)."
        )
    inputs = tuple(jnp.asarray(x) for x in (data[0] if isinstance(data[0], tuple) else data[:1]))
    targets = np.asarray(data[1])
    sizes = [len(x) for x in inputs if x.ndim] + [len(targets)]
    if len(set(sizes)) != 1 or sizes[0] == 0:
        raise ValueError(f"`laplace` needs inputs and targets of as many examples. Got {sizes}.")
    return inputs, targets


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
