"""Tokens that somebody looks at: those that a mask leaves out have no part in averages over tokens."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp

from moment_jax.covariance import Covariance, Separable

Array = jax.Array
S = TypeVar("S", bound=Covariance)


def pool_seen(cov: S, mask: Array | None) -> S:
    """A `Separable` pooled over the tokens that any query may look at; other structures as they are.

    Args:
      cov: covariance of the keys' tokens, (S, D). A `pool` of its own stays.
      mask: (T, S) or (H, T, S) boolean, True where a query may look; None for everywhere.
    """
    if not isinstance(cov, Separable) or mask is None or cov.pool is not None:
        return cov
    if not hasattr(mask, "shape") or mask.shape[-1] != cov.shape[0]:
        return cov  # an error that the layer explains
    seen = jnp.any(mask, axis=tuple(range(mask.ndim - 1)))
    return cov.pooled(seen | ~jnp.any(seen))  # where nobody looks at anything, all count alike


def pool_as(cov: S, before: Covariance) -> S:
    """A `Separable` with the pool that it came with, and its fields alone.

    Within a layer one operation may tell the next more than the fields hold, which `jit` and `scan`
    would drop; dropped here, a stack of layers gives the same result in a loop and in a scan.
    """
    if not isinstance(cov, Separable) or not isinstance(before, Separable):
        return cov
    cov = cov if cov.pool is before.pool else cov.pooled(before.pool)
    known = (
        None if before.sum_variance is None else cov.sum_variance
    )  # a loop's carry keeps its form
    return dataclasses.replace(cov, sum_variance=known)


def look_at_valid(mask: Array | None, valid: Array | None, num_queries: int) -> Array | None:
    """A mask that also leaves out the tokens that are not valid.

    Args:
      mask: (T, S) or (H, T, S), or None.
      valid: (S,) boolean, True for tokens that exist and False for padding; None for all.
      num_queries: T.
    """
    if valid is None:
        return mask
    if mask is None:
        return jnp.broadcast_to(valid[None, :], (num_queries, valid.shape[0]))
    return mask & valid.reshape(*(1,) * (mask.ndim - 1), -1)
