"""The data of `fit`: checks, scaling, held-out split, and batches of a fixed size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from moment_jax.inference.variational import STEPS_AT_ONCE
from moment_jax.objectives import Categorical, Gaussian

Inputs = tuple[np.ndarray, ...]
Data = tuple[Inputs, np.ndarray]
FEWEST_HELD_OUT = 10


@dataclasses.dataclass(frozen=True)
class Scaling:
    """x -> (x - shift) / scale by feature; constant features are only shifted, classes kept."""

    shift: Any = 0.0
    scale: Any = 1.0

    @classmethod
    def of(cls, x: np.ndarray) -> Scaling:
        """The scaling of x to zero mean and unit variance."""
        x = np.asarray(x, np.float64)
        shift, spread = x.mean(axis=0), x.std(axis=0)
        constant = spread <= 1e-12 * np.maximum(np.abs(shift), 1e-300)
        return cls(shift, np.where(constant, 1.0, spread))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The scaled rows, in single precision."""
        if x.dtype.kind != "f":
            return x
        return ((x - self.shift) / self.scale).astype(np.float32)


def checked_likelihood(
    caller: str, likelihood: Any, known: Sequence[type]
) -> tuple[type, float | None]:
    """The likelihood's type, and the noise variance if given."""
    name = likelihood if isinstance(likelihood, type) else type(likelihood)
    if name not in known:
        names = " or ".join(one.__name__ for one in known)
        raise TypeError(
            f"`{caller}` needs the likelihood {names} of mj.objectives. Got {likelihood!r}."
        )
    if name is not Gaussian or likelihood is Gaussian:
        return name, None
    if np.ndim(likelihood.noise_variance) or float(likelihood.noise_variance) <= 0:
        raise ValueError(
            f"`{caller}` needs one positive noise variance for all outputs, or the type Gaussian to "
            f"estimate it. Got {likelihood.noise_variance}."
        )
    return name, float(likelihood.noise_variance)


def examples(caller: str, data: Any) -> tuple[Inputs, Any]:
    """Inputs as a tuple of arrays, and targets as given; checks the number of examples."""
    if not isinstance(data, tuple) or len(data) != 2:
        raise TypeError(
            f"`{caller}` needs data = (inputs, targets). Got {type(data).__name__}. Put several inputs "
            "in a tuple: ((x, mask), targets)."
        )
    inputs = tuple(np.asarray(x) for x in (data[0] if isinstance(data[0], tuple) else data[:1]))
    sizes = [len(x) for x in (*inputs, np.asarray(data[1])) if x.ndim]
    if len(set(sizes)) != 1 or sizes[0] == 0 or np.ndim(data[1]) == 0:
        raise ValueError(f"`{caller}` needs as many inputs as targets. Got {sizes} examples.")
    return inputs, data[1]


def as_inputs(inputs: Any, scaling: Scaling | None) -> Inputs:
    """The inputs as a tuple of arrays, those of a table scaled; floats in single precision."""
    arrays = [np.asarray(x) for x in (inputs if isinstance(inputs, tuple) else (inputs,))]
    if scaling is not None:
        return (scaling(arrays[0].astype(np.float64)),)
    return tuple(x.astype(np.float32) if x.dtype.kind == "f" else x for x in arrays)


def checked_targets(targets: Any, likelihood: type) -> np.ndarray:
    """The targets: (N,) class integers, or (N, D) numbers."""
    y = np.asarray(targets)
    if likelihood is Categorical:
        if y.ndim != 1 or y.dtype.kind not in "iu" or (y.size and y.min() < 0):
            raise ValueError(
                f"`fit` with Categorical needs targets (N,) of integers from 0. Got {y.dtype} of shape "
                f"{y.shape}. Use np.unique(labels, return_inverse=True)[1]."
            )
        return y.astype(np.int32)
    y = y[:, None] if y.ndim == 1 else y
    if y.ndim != 2 or y.dtype.kind not in "fiu":
        raise ValueError(
            f"`fit` with Gaussian needs targets (N,) or (N, D) of numbers. Got {y.dtype} of shape "
            f"{np.shape(targets)}."
        )
    if not np.isfinite(y).all():
        raise ValueError("`fit` needs finite targets. Got NaN or infinity; drop these rows.")
    return y.astype(np.float64)


def checked_data(data: Any, likelihood: type) -> Data:
    """Inputs as a tuple of arrays, and targets; checks that both are finite."""
    inputs, given = examples("fit", data)
    if any(x.dtype.kind == "f" and not np.isfinite(x).all() for x in inputs):
        raise ValueError("`fit` needs finite inputs. Got NaN or infinity; fill or drop them.")
    return inputs, checked_targets(given, likelihood)


def one_table(inputs: Inputs) -> np.ndarray:
    """The single input, a table (N, D)."""
    if len(inputs) != 1 or inputs[0].ndim != 2 or inputs[0].dtype.kind not in "fiub":
        got = ", ".join(f"{x.dtype} {x.shape}" for x in inputs)
        raise ValueError(
            f"`fit(None, ...)` needs one table (N, D) of numbers. Got {got}. For other inputs, pass a "
            "model."
        )
    return inputs[0]


def scaled(data: Data, of_inputs: Scaling | None, of_targets: Scaling) -> Data:
    """The data in the network's units."""
    return as_inputs(data[0], of_inputs), of_targets(data[1])


def divided(data: Data, share: float, seed: int) -> tuple[Data, Data | None]:
    """Split the data at random into training and held-out data."""
    inputs, targets = data
    if not 0 <= share < 1:
        raise ValueError(
            f"`fit` needs validation as a share from 0 to below 1, or as data. Got {share}."
        )
    held = round(share * len(targets))
    if held < FEWEST_HELD_OUT:
        return data, None
    order = np.random.default_rng(seed).permutation(len(targets))

    def part(rows: np.ndarray) -> Data:
        return tuple(x[rows] for x in inputs), targets[rows]

    return part(order[held:]), part(order[:held])


SIZES = (32, 64, 128, 256)


def batch_size(size: int) -> int:
    """The smallest of `SIZES` that holds all examples, else the largest."""
    return next((b for b in SIZES if b >= size), SIZES[-1])


def shuffled(arrays: Any, size: int, seed: int) -> Iterator[Any]:
    """Endless groups of `STEPS_AT_ONCE` batches, (steps, batch, ...), from successive permutations.

    Every example occurs equally often, so batch averages are unbiased.
    """
    rng = np.random.default_rng(seed)
    shape = (STEPS_AT_ONCE, batch_size(size))
    order = np.empty(0, np.int64)
    while True:
        while order.size < shape[0] * shape[1]:
            order = np.concatenate([order, rng.permutation(size)])
        rows, order = order[: shape[0] * shape[1]].reshape(shape), order[shape[0] * shape[1] :]
        yield jax.tree.map(lambda x, rows=rows: x[rows], arrays)


def in_batches(fn: Callable[[Any], Any], arrays: Any) -> Any:
    """A function of arrays (N, ...) by batches; the last one is padded with its first example."""
    size, parts = len(arrays[0]), []
    for first in range(0, size, batch_size(size)):
        rows = np.arange(first, first + batch_size(size))
        rows = np.where(rows < size, rows, first)
        result = fn(jax.tree.map(lambda x, rows=rows: x[rows], arrays))
        parts.append(jax.tree.map(lambda x, left=size - first: np.asarray(x)[:left], result))
    return jax.tree.map(lambda *batches: np.concatenate(batches), *parts)
