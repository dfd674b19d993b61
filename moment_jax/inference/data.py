"""Checks of likelihoods and data, for `fit` and `laplace`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moment_jax.objectives import Categorical, Gaussian

Inputs = tuple[np.ndarray, ...]
Data = tuple[Inputs, np.ndarray]


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


def as_inputs(inputs: Any) -> Inputs:
    """The inputs as a tuple of finite arrays, floats in single precision."""
    arrays = [np.asarray(x) for x in (inputs if isinstance(inputs, tuple) else (inputs,))]
    if any(x.dtype.kind == "f" and not np.isfinite(x).all() for x in arrays):
        raise ValueError("`fit` needs finite inputs. Got NaN or infinity; fill or drop them.")
    return tuple(x.astype(np.float32) if x.dtype.kind == "f" else x for x in arrays)


def as_targets(targets: Any, likelihood: type) -> np.ndarray:
    """The targets: (N,) class integers, or (N, D) numbers in single precision."""
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
    return y.astype(np.float32)


def checked_data(data: Any, likelihood: type) -> Data:
    """Inputs and targets in single precision."""
    inputs, targets = examples("fit", data)
    return as_inputs(inputs), as_targets(targets, likelihood)
