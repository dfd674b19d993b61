"""Which tokens a sum over the tokens may hold: none that a mask hides from a token that uses the sum."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp

from moment_jax.covariance import Covariance, Separable

Array = jax.Array
S = TypeVar("S", bound=Covariance)
P = TypeVar("P", bound=Separable)


def pool_seen(cov: S, mask: Array | None, *, memory: bool = False) -> S:
    """A `Separable` pooled over the tokens that no query is denied; other structures as they are.

    With padding those are the tokens that exist, and with a causal mask the first one: so no later token
    has a part in what is kept of an earlier one. Where the first token is certain and others are not,
    its covariance says nothing about theirs, and all that any query looks at are pooled.

    A `Separable` has its Gram matrices then, formed once for all that reads them.

    Args:
      cov: covariance of the keys' tokens, (S, D). A `pool` of its own stays.
      mask: (T, S), (1, S) or (H, T, S) boolean, True where a query may look; None for everywhere.
      memory: whether the keys are not the queries' own sequence. Then any query's tokens are pooled.
    """
    if not isinstance(cov, Separable):
        return cov
    return _pooled(cov, mask, memory).with_own_grams()


def _pooled(cov: P, mask: Array | None, memory: bool) -> P:
    if mask is None or cov.pool is not None:
        return cov
    if not hasattr(mask, "shape") or mask.shape[-1] != cov.shape[0]:
        return cov  # an error that the layer explains
    seen = jnp.any(mask, axis=tuple(range(mask.ndim - 1)))
    seen = seen | ~jnp.any(seen)  # where nobody looks at anything, all count alike
    if memory or mask.shape[-2] != cov.shape[0]:
        return cov.pooled(seen)
    shown = seen & _shown(mask, seen)
    random = jnp.any(cov.scale != 0, axis=1)
    unknown = jnp.any(random & seen) & ~jnp.any(random & shown)
    return cov.pooled(jnp.where(unknown, seen, shown))


def pool_scores(pool: Array | None, mask: Array | None) -> Array | None:
    """Weights (T,) of a sequence's tokens in averages that serve its scores alone; None for one each.

    Softmax sees differences of keys, and one token has none. Where the pool holds one, the average is
    over the tokens that no query with a choice of keys is denied: two with a causal mask.

    Args:
      pool: of the sequence, (T,).
      mask: (H, T, T) of its self-attention, or None.
    """
    if pool is None:
        return None
    more = jnp.ones(pool.shape, bool)
    if mask is not None:
        seen = jnp.any(mask, axis=(0, 1))
        choice = jnp.sum(jnp.any(mask, axis=0), axis=1) > 1
        more = seen & _shown(mask, seen & choice)
    return jnp.where(jnp.sum(pool > 0) > 1, pool, more.astype(pool.dtype))


def _shown(mask: Array, queries: Array) -> Array:
    """The tokens (T,) that none of those before them which are `queries` (T,) is denied."""
    looks = jnp.any(mask, axis=tuple(range(mask.ndim - 2)))
    later = jnp.tril(jnp.ones(looks.shape, bool))
    return jnp.all(looks | later | ~queries[:, None], axis=0)


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


def look_at_valid(mask: Array | None, valid: Array | None) -> Array | None:
    """A mask that also leaves out the tokens that are not valid; one row for all queries where it can.

    Args:
      mask: (T, S) or (H, T, S), or None.
      valid: (S,) boolean, True for tokens that exist and False for padding; None for all.
    """
    if valid is None:
        return mask
    if mask is None:
        return valid[None, :]
    return mask & valid.reshape(*(1,) * (mask.ndim - 1), -1)
