"""Checks of categorical distributions: shapes while tracing, values where they are on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

Array = jax.Array


def check_categories(name: str, log_probs: Array) -> Array:
    """`log_probs` as floating-point numbers, once their last axis holds at least one category.

    Half precision becomes float32, in which sums of exponentials are right.

    Raises:
      ValueError: if there is no such axis, or it is empty.
    """
    log_probs = jnp.asarray(log_probs)
    if log_probs.ndim == 0 or log_probs.shape[-1] == 0:
        raise ValueError(
            f"`{name}` needs log-probabilities of shape (..., K) with K >= 1 categories. Got "
            f"{tuple(log_probs.shape)}."
        )
    return log_probs.astype(jnp.promote_types(log_probs.dtype, jnp.float32))


def check_probabilities(
    probs: ArrayLike, *, name: str = "probs", tolerance: float = 1e-4
) -> np.ndarray:
    """Probabilities from outside, as an array, once every row is a distribution.

    For values on the host: numpy arrays, lists, or JAX arrays outside `jit`. Compiled code checks no
    values; there, unnormalised log-probabilities are normalised by every function of this room.

    Args:
      probs: (..., K).
      name: what the message calls them.
      tolerance: by how much a row's sum may differ from one.

    Returns:
      The same numbers, (..., K), as floating-point numbers.

    Raises:
      ValueError: if there is no category, or a number is negative or not finite, or a row does not sum
        to one. TypeError: if the values are not known yet, inside `jit`.

    >>> check_probabilities([0.5, 0.25, 0.25])
    array([0.5 , 0.25, 0.25])
    """
    if isinstance(probs, jax.core.Tracer):
        raise TypeError(
            "`check_probabilities` needs values, and inside jit there are none. Check before, or "
            "work with log-probabilities, which need not be normalised."
        )
    array = np.asarray(probs)
    if array.dtype != np.float64:
        array = array.astype(np.float32)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(
            f"{name} needs the shape (..., K) with K >= 1 categories. Got {array.shape}."
        )
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(
            f"{name} needs finite numbers >= 0. Got numbers from {array.min()} to {array.max()}. For "
            "log-probabilities, pass them where log_probs are asked for."
        )
    sums = array.sum(axis=-1, dtype=np.float64)
    worst = float(sums.flat[np.abs(sums - 1).argmax()]) if sums.size else 1.0
    if abs(worst - 1) > tolerance:
        raise ValueError(
            f"{name} needs rows that sum to one, within {tolerance:g}. Got a sum of {worst:.6g}. "
            "Divide by probs.sum(axis=-1, keepdims=True) if they are weights."
        )
    return array
