"""Checks of categorical distributions, made while tracing."""

from __future__ import annotations

import jax
import jax.numpy as jnp

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
