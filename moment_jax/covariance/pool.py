"""Weights p of the pooled sum sum_t p_t x_t of `Separable`, so that masked tokens touch no others."""

import jax.numpy as jnp
from jax import Array


def pool_seen(mask: Array, random: Array, *, memory: bool = False) -> Array:
    """The tokens that no query is denied, (S,) boolean.

    With padding those are the existing tokens. With a causal mask it is the first token, so no later
    token influences an earlier one. If the first token is certain and others are not, its covariance
    says nothing about theirs, and all tokens that some query sees are pooled.

    Args:
      mask: (T, S), (1, S) or (H, T, S) boolean, True where a query may look.
      random: the tokens that are not certain, (S,) boolean.
      memory: whether the keys come from another sequence; if so, pool the tokens that any query sees.
    """
    seen = jnp.any(mask, axis=tuple(range(mask.ndim - 1)))
    seen = seen | ~jnp.any(seen)  # if everything is masked, weigh all equally
    if memory or mask.shape[-2] != mask.shape[-1]:
        return seen
    shown = seen & _shown(mask, seen)
    unknown = jnp.any(random & seen) & ~jnp.any(random & shown)
    return jnp.where(unknown, seen, shown)


def pool_read(read: Array, mask: Array | None) -> Array:
    """The pool (T,) of a sequence of which one sum is read, with these weights (T,).

    It is nine parts what is read, and one part what that looks at: a token that is read may be certain
    before the first attention, and then says nothing of others. Tokens that no query may look at have
    no part in it; if these alone are read, all others are pooled.
    """
    looks = jnp.ones((1, len(read)), bool) if mask is None else mask
    looks = jnp.any(looks, axis=tuple(range(looks.ndim - 2)))
    seen = jnp.any(looks, axis=0)
    seen = seen | ~jnp.any(seen)  # if everything is masked, as in `pool_seen`
    read = jnp.where(seen, read, 0)
    read = jnp.where(jnp.any(read > 0), read, seen)
    around = jnp.sum(looks, axis=0) if len(looks) == 1 else read @ looks
    return 0.9 * read / jnp.sum(read) + 0.1 * around / jnp.maximum(jnp.sum(around), 1e-9)


def pool_scores(pool: Array, mask: Array | None) -> Array:
    """Weights (T,) of tokens in averages used only for the scores.

    Softmax needs differences of keys, which one token does not have. If the pool holds one token,
    average over the tokens that no query with a choice of keys is denied: two with a causal mask.
    `mask` is (H, T, T), or None.
    """
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
