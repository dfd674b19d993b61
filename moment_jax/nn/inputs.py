"""Inputs of a `mj.Bayesian`: arrays or moments, with batch axes."""

import math
from typing import Any

import jax
import numpy as np
from flax.errors import FlaxError

from moment_jax.covariance import Covariance, Moments
from moment_jax.propagation import PropagationError, errors
from moment_jax.propagation.propagator import is_random_input


def arguments(x: Any) -> tuple[Any, ...]:
    """The network's arguments: a tuple of them, or the only one, which may be (mean, cov)."""
    return x if isinstance(x, tuple) and not is_random_input(x) else (x,)


def with_batch(x: Any, axes: int) -> Any:
    """An input with batch axes of length one."""
    if is_random_input(x):
        return Moments(errors.with_axes(x[0], axes), x[1])
    return errors.with_axes(x, axes)


def check_inputs(inputs: tuple[Any, ...], axes: int, structure: type[Covariance]) -> None:
    """Raise unless all are arrays with so many batch axes, and random ones have their covariance."""
    for x in (x[0] if is_random_input(x) else x for x in inputs):
        if not isinstance(x, jax.Array | np.ndarray | np.generic) and not hasattr(
            x, "__jax_array__"
        ):
            raise TypeError(
                f"A Bayesian model needs NumPy or JAX arrays. Got {type(x).__name__}. Use np.asarray(x)."
            )
        if isinstance(x, np.ndarray) and x.dtype.kind in "OSUM":
            raise TypeError(
                f"A Bayesian model needs arrays of numbers. Got {x.dtype}. Encode categories and text."
            )
    for x, cov in (x for x in inputs if is_random_input(x)):
        width = (1, *x.shape[axes:])[-1]
        wanted = (*x.shape[:axes], math.prod(x.shape[axes:]) // width, width)
        if type(cov) is not structure or tuple(cov.shape) != wanted:
            raise ValueError(
                f"A random input (mean, cov) needs a covariance in {structure.__name__} of "
                f"shape {wanted}, with the mean's batch axes. Got {type(cov).__name__} of "
                f"{tuple(cov.shape)}."
            )
    for x in (x[0] if is_random_input(x) else x for x in inputs):
        if x.ndim < axes or 0 in x.shape[:axes]:
            got = tuple(x.shape)
            raise ValueError(
                f"A Bayesian model needs arrays of an example or more, with {axes} leading batch axes. "
                f"Got {got}. For one input, use x[None]."
            )


def explain_batch(
    plain: Any, inputs: tuple[Any, ...], options: Any, axes: int, error: Exception
) -> None:
    """Raise a ValueError if the model failed because the network does not take its inputs.

    They may have one batch axis too few or many.
    """
    batch = inputs[0].shape[:axes] if inputs else ()
    unknown = [k for k in options if f"unexpected keyword argument '{k}'" in str(error)]
    if unknown:
        raise TypeError(
            "`mj.Bayesian` gives keyword arguments to its network. Got "
            f"{', '.join(unknown)}, which it does not take. Leave it out."
        ) from error
    each = [k for k, v in options.items() if batch and getattr(v, "shape", ())[:axes] == batch]
    if each and not isinstance(error, PropagationError):
        raise ValueError(
            f"`mj.Bayesian` shares keyword arguments between examples. Got {', '.join(each)} of "
            f"the batch axes {batch}. Give what each example has of its own by position."
        ) from error

    def as_one(dropped: int) -> Any:
        """Shapes of a batch of one, without the first `dropped` axes of the inputs."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1,) * axes + x.shape[dropped:], x.dtype), inputs
        )

    if isinstance(error.__cause__, FlaxError) or errors.takes(plain, as_one(axes)):
        return
    rule = f"`mj.Bayesian` takes the first {axes} axes of its inputs as a batch"
    one, raised = "a single example of this model has", f"The network raised: {error}"
    mend = f"For one input, use x[None]{'' if axes == 1 else ', once for each axis'}. {raised}"
    more = f"Give batch_axes={axes + 1}. {raised}"
    whole = plain, as_one(0), f"{one} all of theirs", mend
    errors.explain(
        rule, inputs, error, whole, (plain, as_one(axes + 1), f"{one} one axis less", more)
    )
    raise ValueError(
        "`mj.Bayesian` needs inputs that its network takes: check their number, their widths and their "
        f"order, x before targets. Got inputs of shape {errors.shapes(inputs) or 'none'}. {raised}"
    ) from error


def check_key(caller: str, key: Any) -> None:
    """Raise unless it is a random key."""
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(
            f"`{caller}` needs a JAX random key. Got {key!r}. Use jax.random.key(0), of any number."
        )
