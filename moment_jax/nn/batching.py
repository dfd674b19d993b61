"""Leading batch axes: modules accept any number of them, layers take one sequence."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import BATCH_AXIS, Covariance
from moment_jax.covariance.fields import check_array
from moment_jax.layers.checks import described, is_boolean


def over_batch(
    layer: Callable[..., Any],
    structure: type[Covariance],
    *sequences: tuple[Any, ...],
    cache: Any = None,
) -> Any:
    """`layer` of every sequence in a batch, together with its memory, padding mask and cache.

    Sequences are (mean, cov) or (mean, cov, valid), all and the cache with the same leading axes: a mean
    (..., T, D); its covariance, None where it is certain, which is zero in `structure`; (..., T)
    boolean, False for padding, None for none. The layer takes their contents in order, then the cache.
    """
    for mean, cov, *valid in sequences:
        check_sequences(mean, cov)
        _check_valid(mean, *valid)
    shapes = [tuple(mean.shape) for mean, *_ in sequences]
    if len({shape[:-2] for shape in shapes}) > 1:
        raise ValueError(
            "A decoder needs a sequence (..., T, D) and a memory (..., S, E) with the same leading "
            f"axes. Got {' and '.join(map(str, shapes))}. For a single row, use x[None, :]; for one "
            "memory of a whole batch, broadcast it."
        )
    if len(shapes[0]) > 2:
        return jax.vmap(
            lambda sequences, cache: over_batch(layer, structure, *sequences, cache=cache),
            axis_name=BATCH_AXIS,
        )(sequences, cache)
    given = []
    for mean, cov, *valid in sequences:
        known = structure.zeros(mean.shape, mean.dtype) if cov is None else cov
        given += [mean, known, *valid]
    return layer(*given) if cache is None else layer(*given, cache)


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


def _check_valid(mean: Array, valid: Array | None = None) -> None:
    if valid is not None and not is_boolean(valid, tuple(mean.shape[:-1])):
        raise ValueError(
            "`valid` needs one boolean per token, (..., T), False for padding; for a mean of shape "
            f"{tuple(mean.shape)}, {tuple(mean.shape[:-1])}. Got {described(valid)}. For lengths, use "
            "jnp.arange(T) < lengths[..., None]."
        )
