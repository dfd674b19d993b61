"""Checks of likelihoods and data, for `fit` and `laplace`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moment_jax.nn.bayesian import inference_output
from moment_jax.objectives import Bernoulli, Categorical, Gaussian

KINDS = (Categorical, Bernoulli, Gaussian)
Inputs = tuple[np.ndarray, ...]


def checked_likelihood(caller: str, likelihood: Any) -> None:
    """Raise unless it is one of `KINDS`, a Gaussian one with a number as its noise variance, or None."""
    if not isinstance(likelihood, KINDS):
        is_class = isinstance(likelihood, type) and likelihood in KINDS
        raise TypeError(
            f"`{caller}` needs a likelihood, mj.Categorical(), mj.Bernoulli() or mj.Gaussian(). Got "
            f"{likelihood!r}.{f' Use mj.{likelihood.__name__}().' if is_class else ''}"
        )
    noise = getattr(likelihood, "noise_variance", None)
    if noise is not None and (np.ndim(noise) or not 0 < float(noise) < np.inf):
        raise ValueError(
            f"`{caller}` needs one positive noise variance for all outputs. Got {noise}. Use "
            "mj.Gaussian() to estimate it."
        )


def check_positive(caller: str, **settings: Any) -> None:
    """Raise unless these are positive numbers, or None."""
    for name, value in settings.items():
        number = np.asarray(1 if value is None else value)
        if number.ndim or number.dtype.kind not in "iuf" or not 0 < number < np.inf:
            raise ValueError(f"`{caller}` needs a positive number as {name}. Got {value!r}.")


def checked_data(
    caller: str, network: nnx.Module, likelihood: Any, data: Any, like: Inputs | None = None
) -> tuple[Inputs, np.ndarray, tuple[int, ...]]:
    """Inputs, targets and the shape of one example's output; checks the network's mode too.

    Floating inputs come in the precision of the weights, single at least, real targets in double. `like`
    are the inputs of the training, for held-out data.
    """
    if not isinstance(data, tuple) or len(data) != 2:
        raise TypeError(
            f"`{caller}` needs data = (inputs, targets). Got {type(data).__name__}. Put several inputs "
            "in a tuple: ((x, mask), targets)."
        )
    kinds = [w.dtype for w in jax.tree.leaves(nnx.state(network, nnx.Param))]
    dtype = jnp.result_type(jnp.float32, *(k for k in kinds if jnp.issubdtype(k, jnp.floating)))
    given, y = data[0] if isinstance(data[0], tuple) else data[:1], np.asarray(data[1])
    inputs = tuple(_checked_input(caller, np.asarray(x), dtype) for x in given)
    sizes = [len(x) if x.ndim else 0 for x in (*inputs, y)]
    if len(set(sizes)) != 1 or sizes[0] == 0:
        raise ValueError(
            f"`{caller}` needs as many inputs as targets, at least one. Got {sizes} examples."
        )
    if like is not None:
        needed, got = ([(x.shape[1:], x.dtype.name) for x in each] for each in (like, inputs))
        cast = tuple(x.astype(known.dtype) for x, known in zip(inputs, like, strict=False))
        if [x[0] for x in needed] != [x[0] for x in got] or any(
            (new != x).any() for new, x in zip(cast, inputs, strict=True)
        ):
            raise ValueError(
                f"`{caller}` needs held-out inputs like the others, {needed}. Got {got}."
            )
        inputs = cast
    two = tuple(jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype) for x in inputs)
    found = inference_output(caller, network, two, {})
    shape: Any = getattr(found, "shape", ())
    kind = getattr(found, "dtype", int)
    if len(shape) < 2 or shape[0] != 2 or not jnp.issubdtype(kind, jnp.floating):
        raise TypeError(
            f"`{caller}` needs a network that returns one array of real outputs (N, ..., C). Got, for 2 "
            f"examples, {found}. Write a module that calls it and returns such an array."
        )
    return inputs, _checked_targets(caller, likelihood, y, (len(y), *shape[1:]), dtype), shape[1:]


def _checked_input(caller: str, x: np.ndarray, dtype: Any) -> np.ndarray:
    """Floats in this precision, integers that JAX can hold."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if not floating and x.dtype.kind not in "iubc":
        raise TypeError(
            f"`{caller}` needs inputs of numbers, an array (N, ...) or a tuple of them. Got {x.dtype}. "
            "Encode categories and missing values; for other inputs, write a module that takes arrays."
        )
    with np.errstate(over="ignore"):
        new = x.astype(dtype) if floating else x
    if not np.isfinite(new).all():
        raise ValueError(
            f"`{caller}` needs finite inputs, in {dtype}. Got NaN or infinity; fill or drop them."
        )
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        new = x.astype(np.int32)
        if (new != x).any():
            raise ValueError(f"`{caller}` needs integers of 32 bits. Got {x.min()} to {x.max()}.")
    return new


def _checked_targets(
    caller: str, likelihood: Any, y: np.ndarray, outputs: tuple[int, ...], dtype: Any
) -> np.ndarray:
    """Targets that fit outputs of this shape: classes, or numbers finite in this precision."""
    name, labels = type(likelihood).__name__, isinstance(likelihood, Categorical)
    wanted, most = outputs, np.inf if isinstance(likelihood, Gaussian) else 1
    if labels:
        wanted, most = outputs[:-1], outputs[-1] - 1
    elif y.shape == outputs[:-1] and outputs[-1] == 1:
        y = y[..., None]
    fits = y.shape == wanted and y.dtype.kind in ("iu" if labels else "fiub")
    with np.errstate(over="ignore"):
        fits = fits and bool(np.isfinite(y.astype(dtype)).all() and y.max() <= most)
    if fits and (most == np.inf or y.min() >= 0):
        return y.astype(np.int32 if labels else np.float64)
    came = f" from {y.min()} to {y.max()}" if y.dtype.kind in "fiub" else ""
    mend = "Give the network one output for each target, and fill or drop missing values."
    if labels and y.ndim == len(outputs):
        mend = f"Use {'targets[..., 0]' if y.shape[-1] == 1 else 'np.argmax(targets, axis=-1)'}."
    elif labels and y.dtype.kind in "iu" and y.min() >= 0:
        mend = "Give the network an output for every class, and each output a class."
    elif labels:
        mend = "Use np.unique(targets, return_inverse=True)[1]."
    within = f", finite in {dtype}" if most == np.inf else f" from 0 to {most}"
    raise ValueError(
        f"`{caller}` with {name} and outputs of shape {outputs} needs {'integer ' * labels}targets of "
        f"shape {wanted}{within}. Got {y.dtype} of shape {y.shape}{came}. {mend}"
    )
