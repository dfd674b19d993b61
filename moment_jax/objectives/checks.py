"""The accepted forms of an output's covariance, and argument checks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance, Diagonal, Full
from moment_jax.covariance.fields import check_array, check_floating, known_values, need
from moment_jax.xla import inlined

Cov = Array | Covariance


def check_output(name: str, target: Array, mean: Array, cov: Cov) -> Covariance:
    """`structure_of`; raises unless target and mean agree, (D,) or (T, D)."""
    check_array(name, mean)
    shape = tuple(mean.shape)
    right, came = len(shape) in (1, 2) and target.shape == shape, f"{target.shape} and {shape}"
    mend = f"For a batch, use jax.vmap({name}, in_axes=(None, 0, 0, 0))."
    need(name, right, "target.shape == mean.shape, (D,) or (T, D)", came, mend)
    return structure_of(name, mean, cov)


def structure_of(name: str, mean: Array, cov: Cov) -> Covariance:
    """The covariance of a mean (T, D), or (D,) as one token, as a structure; raises unless it fits."""
    check_cov(name, tuple(mean.shape), cov)
    if isinstance(cov, Covariance):
        return cov
    rows = (1, *mean.shape)[-2:]
    if cov.ndim == mean.ndim:
        return Diagonal.unchecked(cov.reshape(rows))
    return Full.unchecked(cov.reshape(2 * rows))


def check_cov(
    name: str, shape: tuple[int, ...], cov: Cov, arrays: tuple[tuple[int, ...], ...] = ()
) -> None:
    """Raise unless `cov` is a structure or an array, of this shape (or twice), or of `arrays`."""
    rule, came = "a covariance: an array or a structure", type(cov).__name__
    need(name, hasattr(cov, "shape"), rule, came, error=TypeError)
    check_floating(name, cov)
    if isinstance(cov, Covariance):
        # One token stands for a vector, as in the covariance that `mj.Bayesian` returns.
        allowed = ((*shape[:-1], 1, *shape[-1:]), *((shape,) if len(shape) > 1 else ()))
    else:
        allowed = (shape, *(arrays or (shape + shape,)))
    wanted = " or ".join(map(str, dict.fromkeys(allowed)))
    rule = f"a covariance (variances, pairs, a structure) of shape {wanted} for a mean {shape}"
    need(name, cov.shape in allowed, rule, cov.shape)


def logits_cov(name: str, mean: Array, cov: Cov) -> Array:
    """The covariance of logits (..., C) as an array, (..., C) or (..., C, C); raises unless it fits."""
    check_array(name, mean)
    need(name, mean.ndim, "logits of shape (..., C)", "()")
    shape = tuple(mean.shape)
    check_cov(name, shape, cov, (shape + shape[-1:],))
    if not isinstance(cov, Covariance):
        return cov
    if cov.entrywise:
        return cov.variance().reshape(shape)
    return cov.token_blocks().reshape(shape + shape[-1:])


def over_batch(fn: Callable[..., Any], mean: Array, *others: Array) -> Any:
    """`fn` of the mean (C,) of each example and its other arrays, over the mean's leading axes."""
    for _ in range(mean.ndim - 1):
        fn = jax.vmap(fn)
    return fn(mean, *others)


def labels_of(name: str, y: Array | int, scores: Array) -> Array:
    """Class indices (...) for scores (..., C); raise unless they are integers, in range if known."""
    known, y = known_values(y), jnp.asarray(y)
    shape, most = tuple(scores.shape[:-1]), scores.shape[-1] - 1
    rule = f"an integer class for each prediction, of shape {shape}"
    right = y.shape == shape and jnp.issubdtype(y.dtype, jnp.integer)
    mend = "For one-hot targets, pass jnp.argmax(y, axis=-1)."
    need(name, right, rule, f"{y.shape} of {y.dtype}", mend)
    if known is not None and known.size:
        right, came = 0 <= known.min() <= known.max() <= most, f"{known.min()} to {known.max()}"
        need(name, right, f"classes from 0 to {most}", came, "Leave out unlabelled examples.")
    return y


@inlined
def of_label(values: Array, label: Array) -> Array:
    """values[label]; NaN if the label is out of range, which compiled code cannot raise."""
    at_label = jnp.asarray(values).at[label]
    return at_label.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
