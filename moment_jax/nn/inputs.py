"""Inputs of a `mj.Bayesian`: arrays or moments, with a batch axis."""

import math
from typing import Any

import jax
import numpy as np
from flax.errors import FlaxError

from moment_jax.covariance import Covariance, Moments
from moment_jax.covariance.fields import need
from moment_jax.propagation import PropagationError, errors
from moment_jax.propagation.propagator import is_random_input


def arguments(x: Any) -> tuple[Any, ...]:
    """The network's arguments: a tuple of them, or the only one, which may be (mean, cov)."""
    return x if isinstance(x, tuple) and not is_random_input(x) else (x,)


def with_batch(x: Any) -> Any:
    """An input with a batch axis of length one."""
    return Moments(x[0][None], x[1]) if is_random_input(x) else x[None]


def check_inputs(inputs: tuple[Any, ...], structure: type[Covariance]) -> None:
    """Raise unless all are arrays with a batch axis, and random ones have their covariance."""
    need("mj.Bayesian", inputs, "the inputs of its network", "none")
    for given in inputs:
        x, cov = given if is_random_input(given) else (given, None)
        right = isinstance(x, jax.Array | np.ndarray | np.generic) or hasattr(x, "__jax_array__")
        came, mend = type(x).__name__, "Use np.asarray(x)."
        need("mj.Bayesian", right, "NumPy or JAX arrays", came, mend, TypeError)
        right = not isinstance(x, np.ndarray) or x.dtype.kind not in "OSUM"
        mend = "Encode categories and text."
        need("mj.Bayesian", right, "arrays of numbers", getattr(x, "dtype", ""), mend, TypeError)
        rule = "arrays of an example or more, with a batch axis"
        mend = "For one input, use x[None]."
        need("mj.Bayesian", x.ndim and x.shape[0] != 0, rule, tuple(x.shape), mend)
        if cov is not None:
            width = (1, *x.shape[1:])[-1]
            shape = (x.shape[0], math.prod(x.shape[1:]) // width, width)
            right, kind = type(cov) is structure and tuple(cov.shape) == shape, structure.__name__
            rule = f"a covariance in {kind} of shape {shape}, with the mean's batch axis"
            need("model((mean, cov))", right, rule, f"{type(cov).__name__} of {tuple(cov.shape)}")


def check_certain(call: str, inputs: tuple[Any, ...], mend: str = "Give its mean.") -> None:
    """Raise if an input is random."""
    right = not any(map(is_random_input, inputs))
    need(call, right, "certain inputs", "the moments of a random one", mend)


def explain_batch(plain: Any, inputs: tuple[Any, ...], options: Any, error: Exception) -> None:
    """Raise unless the network takes these inputs: they may have a batch axis too few or many."""
    size = inputs[0].shape[0]
    unknown = [k for k in options if f"unexpected keyword argument '{k}'" in str(error)]
    if unknown:
        raise TypeError(
            "`mj.Bayesian` gives keyword arguments to its network. Got "
            f"{', '.join(unknown)}, which it does not take. Leave it out."
        ) from error
    each = [k for k, v in options.items() if getattr(v, "shape", ())[:1] == (size,)]
    if each and not isinstance(error, PropagationError):
        raise ValueError(
            f"`mj.Bayesian` shares keyword arguments between examples. Got {', '.join(each)} of "
            f"the batch axis {size}. Give what each example has of its own by position."
        ) from error

    def as_one(dropped: int) -> Any:
        """Shapes of a batch of one, without the first `dropped` axes of the inputs."""
        kind = jax.ShapeDtypeStruct
        return jax.tree.map(lambda x: kind((1, *x.shape[dropped:]), x.dtype), inputs)

    if isinstance(error.__cause__, FlaxError) or errors.takes(plain, as_one(1)):
        return
    rule = "`mj.Bayesian` takes the first axis of its inputs as a batch"
    one, raised = "a single example of this model has", f"The network raised: {error}"
    whole = plain, as_one(0), f"{one} all of theirs", f"For one input, use x[None]. {raised}"
    less = plain, as_one(2), f"{one} one axis less", f"Make one of the first two axes. {raised}"
    errors.explain(rule, inputs, error, whole, less)
    raise ValueError(
        "`mj.Bayesian` needs inputs that its network takes: check their number, their widths and their "
        f"order, x before targets. Got inputs of shape {errors.shapes(inputs)}. {raised}"
    ) from error


def check_key(caller: str, key: Any) -> None:
    """Raise unless it is a random key."""
    right, mend = isinstance(key, jax.Array | np.ndarray), "Use jax.random.key(0), of any number."
    need(caller, right, "a JAX random key", key, mend, TypeError)
