"""Which tokens a sum over tokens may include, so that masked tokens never influence others."""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance, Separable

S = TypeVar("S", bound=Covariance)
P = TypeVar("P", bound=Separable)


def pool_seen(cov: S, mask: Array | None, *, memory: bool = False) -> S:
    """Pool a `Separable` over the tokens that no query is denied; other structures are unchanged.

    With padding those are the existing tokens. With a causal mask it is the first token, so no later
    token influences an earlier one. If the first token is certain and others are not, its covariance
    says nothing about theirs, and all tokens that some query sees are pooled. The Gram matrices are
    computed once for all later uses.

    Args:
      cov: covariance of the keys' tokens, (S, D). An existing `pool` is kept.
      mask: (T, S), (1, S) or (H, T, S) boolean, True where a query may look; None for no mask.
      memory: whether the keys come from another sequence; if so, pool the tokens that any query sees.
    """
    if not isinstance(cov, Separable):
        return cov
    return _pooled(cov, mask, memory).with_own_grams()


def _pooled(cov: P, mask: Array | None, memory: bool) -> P:
    if mask is None or cov.pool is not None:
        return cov
    if not hasattr(mask, "shape") or mask.shape[-1] != cov.shape[0]:
        return cov  # the layer raises an error for it
    seen = jnp.any(mask, axis=tuple(range(mask.ndim - 1)))
    seen = seen | ~jnp.any(seen)  # if everything is masked, weigh all equally
    if memory or mask.shape[-2] != cov.shape[0]:
        return cov.pooled(seen)
    shown = seen & _shown(mask, seen)
    random = jnp.any(cov.scale != 0, axis=1)
    unknown = jnp.any(random & seen) & ~jnp.any(random & shown)
    return cov.pooled(jnp.where(unknown, seen, shown))


def pool_scores(pool: Array | None, mask: Array | None) -> Array | None:
    """Weights (T,) of tokens in averages used only for the scores; None for ones.

    Softmax needs differences of keys, which one token does not have. If the pool holds one token,
    average over the tokens that no query with a choice of keys is denied: two with a causal mask.
    `mask` is (H, T, T), or None.
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
    """The tokens (T,) that are visible to each earlier token among `queries` (T,)."""
    looks = jnp.any(mask, axis=tuple(range(mask.ndim - 2)))
    later = jnp.tril(jnp.ones(looks.shape, bool))
    return jnp.all(looks | later | ~queries[:, None], axis=0)


def pool_as(cov: S, before: Covariance) -> S:
    """A `Separable` with the pool of `before`, and without cached Gram matrices.

    `jit` and `scan` drop cached values. Dropping them here too gives a stack of layers the same result
    in a loop and in a scan.
    """
    if not isinstance(cov, Separable) or not isinstance(before, Separable):
        return cov
    cov = cov if cov.pool is before.pool else cov.pooled(before.pool)
    # The carry of a loop must keep its structure.
    known = None if before.sum_variance is None else cov.sum_variance
    return dataclasses.replace(cov, sum_variance=known)


def look_at_valid(mask: Array | None, valid: Array | None) -> Array | None:
    """Exclude padding from a mask (T, S) or (H, T, S); without a mask, (1, S) for all queries.

    `valid` is (S,) boolean, True for tokens that exist; None for all.
    """
    if valid is None:
        return mask
    if mask is None:
        return valid[None, :]
    return mask & valid.reshape(*(1,) * (mask.ndim - 1), -1)
