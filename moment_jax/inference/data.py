"""Checks of likelihoods and data, for `fit` and `laplace`."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moment_jax.covariance.fields import need
from moment_jax.nn import likelihood as likelihoods
from moment_jax.nn.modules import FLOATING, inference_output
from moment_jax.nn.static import Static
from moment_jax.objectives import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian

REAL = (Gaussian, HeteroscedasticGaussian)
CLASSES = (
    "Classes are integers from 0, as targets[..., 0], np.argmax(targets, axis=-1) or np.unique(targets, "
    "return_inverse=True)[1] make them, and the network has an output for each class."
)
Inputs = tuple[np.ndarray, ...]


def likelihood(caller: str, given: Any) -> None:
    """Raise unless it is a likelihood, a Gaussian one with a number as its noise variance, or None."""
    likelihoods.check(caller, given)
    noise = getattr(given, "noise_variance", None)
    right = noise is None or (np.ndim(noise) == 0 and 0 < float(noise) < np.inf)
    rule = "one positive noise variance for all outputs"
    need(caller, right, rule, noise, "Use mj.Gaussian() to estimate it.")


def warn(caller: str, message: str) -> None:
    """Warn the user who called this function."""
    warnings.warn(f"`{caller}`: {message}", stacklevel=3)


def positive(caller: str, **settings: Any) -> None:
    """Raise unless these are positive numbers, or None."""
    for name, value in settings.items():
        number = np.asarray(1 if value is None else value)
        right = number.ndim == 0 and number.dtype.kind in "iuf" and 0 < number < np.inf
        need(caller, right, f"a positive number as {name}", repr(value))


def data(
    caller: str, network: nnx.Module, likelihood: Any, given: Any, like: Inputs | None = None
) -> tuple[Inputs, np.ndarray, tuple[int, ...]]:
    """Inputs, targets and the shape of one example's output; checks the network's mode too.

    Floating inputs come in the precision of the weights, single at least, real targets in double. `like`
    are the inputs of the training, for held-out data.
    """
    check = partial(need, caller)
    pair, came = isinstance(given, tuple) and len(given) == 2, type(given).__name__
    mend = "Put several inputs in a tuple: ((x, mask), targets)."
    check(pair, "data = (inputs, targets)", came, mend, TypeError)
    kinds = [w.dtype for w in jax.tree.leaves(nnx.state(network, nnx.Param))]
    dtype = jnp.result_type(jnp.float32, *(k for k in kinds if jnp.issubdtype(k, jnp.floating)))
    several, y = given[0] if isinstance(given[0], tuple) else given[:1], np.asarray(given[1])
    inputs = tuple(_input(check, np.asarray(x), dtype) for x in several)
    sizes = [len(x) if x.ndim else 0 for x in (*inputs, y)]
    right = len(set(sizes)) == 1 and sizes[0] > 0
    check(right, "as many inputs as targets, at least one", f"{sizes} examples")
    if like is not None:
        needed, got = ([(x.shape[1:], x.dtype.name) for x in each] for each in (like, inputs))
        same = [x[0] for x in needed] == [x[0] for x in got]
        cast = [x.astype(known.dtype) for x, known in zip(inputs, like, strict=False)]
        same = same and all((new == x).all() for new, x in zip(cast, inputs, strict=True))
        check(same, f"held-out inputs like the others, {needed}", got)
        inputs = tuple(cast)
    two = tuple(jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype) for x in inputs)
    try:
        found = inference_output(caller, network, two, {})
    except (TypeError, ValueError) as error:
        own = str(error).startswith(f"`{caller}`")
        came = f"inputs of shape {' and '.join(str(x.shape) for x in inputs)}, targets {y.shape}"
        mend = f"The network raised: {error}"
        check(own, "inputs that its network takes, before their targets", came, mend)
        raise
    shape: Any = getattr(found, "shape", ())
    kind = getattr(found, "dtype", int)
    right = len(shape) >= 2 and shape[0] == 2 and jnp.issubdtype(kind, jnp.floating)
    rule = "a network that returns one array of real outputs (N, ..., C)"
    mend = "Write a module that calls it and returns such an array."
    check(right, rule, f"{found} for N = 2", mend, TypeError)
    if isinstance(likelihood, Categorical | Bernoulli) and like is None:
        given = _probabilities(network, tuple(x[:8] for x in inputs))
        mend = "Take the softmax or the sigmoid at the network's end out."
        check(given is None, f"logits for {likelihood}", f"probabilities, such as {given}", mend)
    return inputs, _targets(check, likelihood, y, (len(y), *shape[1:]), dtype), shape[1:]


def _probabilities(network: nnx.Module, inputs: Inputs) -> Any:
    """An output if the outputs are probabilities: of sum one, or from 0 to 1 at large weights too."""
    rng, large = np.random.default_rng(0), nnx.clone(network)
    for _, x in nnx.to_flat_state(nnx.state(large, FLOATING)):
        x.set_value(jnp.asarray(9 * rng.normal(size=x.shape), x.dtype))
    found, other = outputs_of(network, inputs), outputs_of(large, inputs)
    within = [((x >= 0) & (x <= 1)).all() for x in (found, other)]
    one = found.shape[-1] > 1 and np.allclose(found.sum(axis=-1), 1, atol=1e-2)
    return found[0].round(3) if within[0] and (one or within[1]) else None


def outputs_of(network: nnx.Module, inputs: Inputs) -> np.ndarray:
    """The network's outputs (N, ..., C), in double precision."""
    graph, state = nnx.split(network)
    return np.asarray(_outputs(Static(graph), state, inputs), np.float64)


@partial(jax.jit, static_argnums=0)
def _outputs(graph: Static, state: Any, inputs: Inputs) -> Any:
    return nnx.merge(graph.value, state, copy=True)(*inputs)


def _input(check: Any, x: np.ndarray, dtype: Any) -> np.ndarray:
    """Floats in this precision, integers that JAX can hold."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    mend = "Encode categories and lost values; for other inputs, write a module that takes arrays."
    rule = "inputs of numbers, an array (N, ...) or a tuple of them"
    check(floating or x.dtype.kind in "iubc", rule, x.dtype, mend, TypeError)
    with np.errstate(over="ignore"):
        new = x.astype(dtype) if floating else x
    rule = f"finite inputs, in {dtype}"
    check(np.isfinite(new).all(), rule, "NaN or infinity", "Fill or drop them.")
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        new = x.astype(np.int32)
        check((new == x).all(), "integers of 32 bits", f"{x.min()} to {x.max()}" if x.size else "")
    _kept(check, "inputs", x, dtype)
    return new


def _kept(check: Any, what: str, x: np.ndarray, dtype: Any) -> None:
    """Raise if rounding to this precision changes a column (..., D) beside its own spread."""
    if x.dtype == dtype or x.dtype.itemsize < 4 or not x.size:
        return
    columns = x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1).astype(np.float64)
    lost, sd = np.abs(columns.astype(dtype) - columns).max(axis=0), columns.std(axis=0)
    for i in np.flatnonzero((lost > 0.005 * sd) & (sd > 1e-12 * np.abs(columns).max(axis=0))):
        rule = f"{what} that {np.dtype(dtype)} holds to a hundredth of their standard deviation"
        came = f"a column {i} of mean {columns[:, i].mean():.9g} and standard deviation {sd[i]:.3g}"
        check(False, rule, came, f"Subtract its mean in float64, here and from all {what} to come.")


def _targets(
    check: Any, likelihood: Any, y: np.ndarray, outputs: tuple[int, ...], dtype: Any
) -> np.ndarray:
    """Targets that fit outputs of this shape: classes, or numbers finite in this precision."""
    classes, real = isinstance(likelihood, Categorical), isinstance(likelihood, REAL)
    if isinstance(likelihood, HeteroscedasticGaussian):
        rule = "2 D outputs of HeteroscedasticGaussian, D means and then D log noise variances"
        check(outputs[-1] % 2 == 0, rule, f"{outputs[-1]} outputs")
        outputs = (*outputs[:-1], outputs[-1] // 2)
    shape, most = (outputs[:-1], outputs[-1] - 1) if classes else (outputs, np.inf if real else 1)
    if y.shape == outputs[:-1] and outputs[-1] == 1 and not classes:
        y = y[..., None]
    right = y.shape == shape and y.dtype.kind in ("iu" if classes else "fiub")
    with np.errstate(over="ignore"):
        right = right and np.isfinite(y.astype(dtype)).all() and y.max() <= most
    within = f", finite in {dtype}" if real else f" from 0 to {most}"
    came = f"{y.dtype} of shape {y.shape}"
    came += f" from {y.min()} to {y.max()}" if y.size and y.dtype.kind in "fiub" else ""
    mend = "Give the network one output for each target, and fill or drop missing values."
    mend = f"The outputs are of shape {outputs}. {CLASSES if classes else mend}"
    rule = f"{'integer ' * classes}targets of shape {shape}{within}"
    check(right and (real or y.min() >= 0), rule, came, mend)
    if real:
        _kept(check, "targets", y, dtype)
    return y.astype(np.int32 if classes else np.float64)
