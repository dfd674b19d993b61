"""Argument checks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.covariance.fields import check_array, known_values, need
from moment_jax.xla import diagonal_of, inlined


def check_moments(name: str, mean: Array, cov: Array) -> None:
    """Raise unless these are a mean (..., D), and its variances or its covariances (..., D, D)."""
    mend = "Take moments.variance or moments.features of mj.Moments(mean, cov)."
    structure, came = isinstance(cov, Covariance), type(cov).__name__
    need(name, not structure, "variances or covariances as an array", came, mend, TypeError)
    check_array(name, mean)
    check_array(name, cov)
    shape = tuple(mean.shape)
    need(name, shape, "a mean of shape (..., D)", shape)
    pairs = shape + shape[-1:]
    rule = f"variances or covariances, of shape {shape} or {pairs} for a mean {shape}"
    need(name, cov.shape in (shape, pairs), rule, cov.shape)


def variance_of(mean: Array, cov: Array) -> Array:
    """The variances of a mean, which may have come as covariances."""
    return cov if cov.ndim == mean.ndim else diagonal_of(cov)


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
