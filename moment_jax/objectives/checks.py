"""The accepted forms of an output's covariance, and argument checks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.covariance.fields import check_array, check_floating, known_values
from moment_jax.covariance.numerics import vector_variance
from moment_jax.xla import diagonal_matrix, diagonal_of, inlined

Cov = Array | Covariance


def check_output(name: str, target: Array, mean: Array, cov: Cov) -> None:
    """Raise unless target and mean agree, (D,) or (T, D), and `cov` is a covariance of the mean."""
    check_array(name, mean)
    shape = tuple(mean.shape)
    if len(shape) not in (1, 2) or tuple(target.shape) != shape:
        raise ValueError(
            f"`{name}` needs target.shape == mean.shape, (D,) or (T, D). Got {tuple(target.shape)} "
            f"and {shape}. For a batch, use jax.vmap({name}, in_axes=(None, 0, 0, 0))."
        )
    check_cov(name, shape, cov)


def check_cov(
    name: str, shape: tuple[int, ...], cov: Cov, arrays: tuple[tuple[int, ...], ...] = ()
) -> None:
    """Raise unless `cov` is a covariance of an array of this shape.

    That is a structure, an array of this shape or of this shape twice, or one of the other shapes.
    """
    if not hasattr(cov, "shape"):
        raise TypeError(
            f"`{name}` needs a covariance: an array or a structure. Got {type(cov).__name__}."
        )
    check_floating(name, cov)
    if isinstance(cov, Covariance):
        # One token stands for a vector, as in the covariance that `mj.Bayesian` returns.
        allowed = ((*shape[:-1], 1, *shape[-1:]), *((shape,) if len(shape) > 1 else ()))
    else:
        allowed = (shape, *(arrays or (shape + shape,)))
    if tuple(cov.shape) not in allowed:
        wanted = " or ".join(str(form) for form in dict.fromkeys(allowed))
        raise ValueError(
            f"`{name}` needs a covariance of shape {wanted} (variances, every pair, or a structure) "
            f"for a mean of shape {shape}. Got {tuple(cov.shape)}."
        )


def logits_cov(name: str, mean: Array, cov: Cov) -> Array:
    """The covariance of logits (..., C) as an array, (..., C) or (..., C, C); raises unless it fits."""
    check_array(name, mean)
    if mean.ndim == 0:
        raise ValueError(f"`{name}` needs logits of shape (..., C). Got ().")
    shape = tuple(mean.shape)
    check_cov(name, shape, cov, (shape + shape[-1:],))
    if not isinstance(cov, Covariance):
        return cov
    if cov.entrywise:
        return cov.variance().reshape(shape)
    return cov.token_blocks().reshape(shape + shape[-1:])


def check_one(name: str, mean: Array, cov: Cov) -> Array:
    """`logits_cov` of one example, whose mean has the shape (C,)."""
    if getattr(mean, "ndim", 1) != 1:
        raise ValueError(
            f"`{name}` needs the logits of one example, of shape (C,). Got {tuple(mean.shape)}. "
            f"For a batch, use jax.vmap."
        )
    return logits_cov(name, mean, cov)


def over_batch(fn: Callable[..., Any], mean: Array, *others: Array) -> Any:
    """`fn` of the mean (C,) of each example and its other arrays, over the mean's leading axes."""
    for _ in range(mean.ndim - 1):
        fn = jax.vmap(fn)
    return fn(mean, *others)


def labels_of(name: str, y: Array | int, scores: Array) -> Array:
    """Class indices (...) for scores (..., C); raise unless they are integers, in range if known."""
    known, y = known_values(y), jnp.asarray(y)
    shape, most = tuple(scores.shape[:-1]), scores.shape[-1] - 1
    if y.shape != shape or not jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(
            f"`{name}` needs an integer class for each prediction, of shape {shape}. Got "
            f"{tuple(y.shape)} of {y.dtype}. For one-hot targets, pass jnp.argmax(y, axis=-1)."
        )
    if known is not None and known.size and not 0 <= known.min() <= known.max() <= most:
        raise ValueError(
            f"`{name}` needs classes from 0 to {most}. Got {known.min()} to {known.max()}. Leave out "
            "unlabelled examples."
        )
    return y


@inlined
def of_label(values: Array, label: Array) -> Array:
    """values[label]; NaN if the label is out of range, which compiled code cannot raise."""
    at_label = jnp.asarray(values).at[label]
    return at_label.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def variances(mean: Array, cov: Cov) -> Array:
    """Var[f], in the shape of the mean (..., D), from any form of its covariance."""
    if isinstance(cov, Covariance):
        return cov.variance().reshape(mean.shape)
    if cov.ndim == mean.ndim + 1:
        return diagonal_of(cov)
    flat = cov.reshape((mean.size,) * (cov.ndim // mean.ndim))  # variances, or of every pair
    return vector_variance(flat).reshape(mean.shape)


def token_blocks(mean: Array, cov: Cov) -> Array:
    """Each token's own covariance, (T, D, D); a vector counts as one token."""
    if isinstance(cov, Covariance):
        return cov.token_blocks()
    if cov.ndim == mean.ndim:
        return diagonal_matrix(jnp.atleast_2d(cov))
    return cov[None] if mean.ndim == 1 else jnp.einsum("tdte->tde", cov)
