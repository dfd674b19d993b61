"""Checks of likelihoods and data, for `fit` and `laplace`."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
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
    if np.ndim(likelihood.noise_variance) or not 0 < float(likelihood.noise_variance) < np.inf:
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
        raise ValueError(
            f"`{caller}` needs as many inputs as targets, at least one. Got {sizes} examples."
        )
    return inputs, data[1]


def as_inputs(inputs: Any, like: Inputs | None = None) -> Inputs:
    """The inputs as a tuple of arrays of one length: finite single-precision floats, or integers.

    With `like`, the training inputs, they need the same number, shape and type.
    """
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    arrays = tuple(_as_input(np.asarray(x)) for x in given)
    sizes = [len(x) if x.ndim else 0 for x in arrays]
    if len(set(sizes)) != 1 or not all(sizes):
        raise ValueError(f"`fit` needs one example or more of each input. Got {sizes} examples.")
    if like is None:
        return arrays
    needed, got = ([x.shape[1:] for x in each] for each in (like, arrays))
    if needed != got:
        raise ValueError(
            f"The model was trained on examples of shape {_listed(needed)}. Got {_listed(got)}. For "
            "others, call mj.bayesian(fitted.model, fitted.posterior)."
        )
    cast = tuple(x.astype(known.dtype) for x, known in zip(arrays, like, strict=True))
    if any((new != x).any() for new, x in zip(cast, arrays, strict=True)):
        raise ValueError(
            f"The model was trained on inputs of {_listed([x.dtype for x in like])}. Got "
            f"{_listed([x.dtype for x in arrays])} with other values."
        )
    return cast


def _as_input(x: np.ndarray) -> np.ndarray:
    """Floats in single precision, integers that JAX can hold."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if not floating and x.dtype.kind not in "iub":
        raise TypeError(
            f"`fit` needs inputs of numbers. Got {x.dtype}. Encode categories and missing values first."
        )
    with np.errstate(over="ignore"):
        new = x.astype(np.float32) if floating else x
    if floating and not np.isfinite(new).all():
        raise ValueError(
            "`fit` needs finite inputs, in single precision. Got NaN or infinity; fill or drop them."
        )
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        new = x.astype(np.int32)
        if (new != x).any():
            raise ValueError(f"`fit` needs integers of 32 bits. Got {x.min()} to {x.max()}.")
    return new


def _listed(items: Any) -> str:
    return ", ".join(map(str, items))


def checked_data(data: Any, likelihood: type, num_outputs: int, like: Inputs | None = None) -> Data:
    """Inputs and targets of one length: in single precision and, with `like`, as in training.

    Targets are (N,) class integers, or (N, D) numbers.
    """
    given, targets = examples("fit", data)
    inputs, y = as_inputs(given, like), np.asarray(targets)
    if likelihood is Categorical:
        if y.ndim != 1 or y.dtype.kind not in "iu" or (y.size and y.min() < 0):
            fix = "np.unique(labels, return_inverse=True)[1]"
            if y.ndim == 2:
                fix = "labels[:, 0]" if y.shape[1] == 1 else "np.argmax(labels, axis=1)"
            raise ValueError(
                f"`fit` with Categorical needs targets (N,) of integers from 0. Got {y.dtype} of shape "
                f"{y.shape}{f' from {y.min()}' if y.size and y.dtype.kind in 'iuf' else ''}. Use {fix}."
            )
        if y.size and y.max() >= num_outputs:
            raise ValueError(
                f"`fit` needs labels from 0 to {num_outputs - 1}, since the model has {num_outputs} "
                f"outputs. Got {y.max()}. Give the model an output for every class."
            )
        return inputs, y.astype(np.int32)
    y = y[:, None] if y.ndim == 1 else y
    if y.ndim != 2 or y.dtype.kind not in "fiu":
        raise ValueError(
            f"`fit` with Gaussian needs targets (N,) or (N, D) of numbers. Got {y.dtype} of shape "
            f"{np.shape(targets)}."
        )
    if y.shape[1] != num_outputs:
        raise ValueError(
            f"`fit` needs as many targets as the model has outputs, {num_outputs}. Got {y.shape[1]}."
        )
    with np.errstate(over="ignore"):
        y = y.astype(np.float32)
    if not np.isfinite(y).all():
        raise ValueError(
            "`fit` needs finite targets, in single precision. Got NaN or infinity; drop these rows."
        )
    return inputs, y
