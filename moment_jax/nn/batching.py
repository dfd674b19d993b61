"""Leading batch axes: modules accept any number of them, layers take one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moment_jax.covariance import BATCH_AXIS, Covariance
from moment_jax.covariance.checks import check_array
from moment_jax.layers.checks import described, is_boolean

Array = jax.Array


def over_batch(
    layer: Callable[..., Any],
    mean: Array,
    cov: Covariance | None,
    structure: type[Covariance],
    valid: Array | None = None,
) -> Any:
    """Apply `layer` to every sequence of a batch (..., T, D).

    Args:
      layer: a function of one (T, D) mean and its covariance, and of `valid` where that is given.
      mean: (..., T, D).
      cov: covariance with the same leading axes on its leaves; None where the input is certain.
      structure: the structure in which a certain input starts.
      valid: (..., T) boolean, True for the tokens that exist; None for all.
    """
    check_sequences(mean, cov)
    check_valid(mean, valid)
    if mean.ndim > 2:
        axes = (0, None if cov is None else 0, None if valid is None else 0)
        return jax.vmap(
            lambda m, c, v: over_batch(layer, m, c, structure, v),
            in_axes=axes,
            axis_name=BATCH_AXIS,
        )(mean, cov, valid)
    inputs = (mean, _certain(mean, structure) if cov is None else cov)
    return layer(*inputs) if valid is None else layer(*inputs, valid)


def over_batch_with_memory(
    layer: Callable[..., Any],
    mean: Array,
    cov: Covariance | None,
    memory_mean: Array,
    memory_cov: Covariance | None,
    structure: type[Covariance],
    valid: Array | None = None,
    memory_valid: Array | None = None,
) -> Any:
    """`over_batch` of a sequence (..., T, D) and a memory (..., S, E) with the same leading axes.

    The layer takes two means and covariances, (mean, cov, memory_mean, memory_cov), and after them what
    tokens exist of the sequence and of the memory, (T,) and (S,), or None for all.
    """
    check_sequences(mean, cov)
    check_sequences(memory_mean, memory_cov)
    check_valid(mean, valid)
    check_valid(memory_mean, memory_valid)
    if mean.shape[:-2] != memory_mean.shape[:-2]:
        raise ValueError(
            "A decoder needs a sequence (..., T, D) and a memory (..., S, E) with the same leading "
            f"axes. Got {tuple(mean.shape)} and {tuple(memory_mean.shape)}. For a single row, use "
            "x[None, :]; for one memory of a whole batch, broadcast it."
        )
    if mean.ndim > 2:
        inputs = (mean, cov, memory_mean, memory_cov, valid, memory_valid)

        def one(m: Any, c: Any, n: Any, d: Any, v: Any, w: Any) -> Any:
            return over_batch_with_memory(layer, m, c, n, d, structure, v, w)

        axes = tuple(None if x is None else 0 for x in inputs)
        return jax.vmap(one, in_axes=axes, axis_name=BATCH_AXIS)(*inputs)
    return layer(
        mean,
        _certain(mean, structure) if cov is None else cov,
        memory_mean,
        _certain(memory_mean, structure) if memory_cov is None else memory_cov,
        valid,
        memory_valid,
    )


def over_batch_with_cache(
    layer: Callable[[Array, Covariance, Any], Any],
    mean: Array,
    cov: Covariance | None,
    cache: Any,
    structure: type[Covariance],
) -> Any:
    """`over_batch` of the newest tokens (..., N, D) and a cache with the same leading axes."""
    check_sequences(mean, cov)
    if mean.ndim > 2:
        axes = (0, None if cov is None else 0, 0)
        return jax.vmap(
            lambda m, c, k: over_batch_with_cache(layer, m, c, k, structure), in_axes=axes
        )(mean, cov, cache)
    return layer(mean, _certain(mean, structure) if cov is None else cov, cache)


def check_sequences(mean: Array, cov: Covariance | None = None) -> None:
    """Raise unless these are the moments of sequences (..., T, D)."""
    check_array("module(mean, cov)", mean)
    if mean.ndim < 2:
        raise ValueError(
            f"A module needs an input of shape (..., T, D). Got {tuple(mean.shape)}. For a single "
            "row, use x[None, :]."
        )
    batch = tuple(mean.shape[:-2])
    fields = [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(cov)]
    if any(shape[: len(batch)] != batch for shape in fields):
        raise ValueError(
            f"A module needs a covariance with the leading axes of its mean, {batch}. Got fields "
            f"{', '.join(map(str, fields))}. For one covariance of the whole batch, broadcast every "
            f"leaf to ({', '.join(map(str, batch))}, *leaf.shape)."
        )


def check_valid(mean: Array, valid: Array | None) -> None:
    """Raise unless `valid` says True or False of every token of a (..., T, D) batch."""
    if valid is None:
        return
    if not is_boolean(valid, tuple(mean.shape[:-1])):
        raise ValueError(
            "`valid` needs a boolean for each token, (..., T), True for those that exist and False "
            f"for padding; with a mean of shape {tuple(mean.shape)}, {tuple(mean.shape[:-1])}. Got "
            f"{described(valid)}. For lengths, use jnp.arange(T) < lengths[..., None]."
        )


def _certain(mean: Array, structure: type[Covariance]) -> Covariance:
    """The covariance of a sequence that is known."""
    return structure.zeros((mean.shape[0], mean.shape[1]), mean.dtype)
