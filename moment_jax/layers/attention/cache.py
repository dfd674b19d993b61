"""Attention of the newest tokens to cached keys and values, at a cost linear in the keys.

For structures with independent tokens, `Diagonal` and `TokenBlock`: the moments of earlier keys and
values do not change. With correlated tokens a step would need the newest token's covariance with all
earlier ones, so run the whole pass.
"""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import STRUCTURES, Covariance
from moment_jax.layers.attention.attend import View, attend, make_source
from moment_jax.layers.attention.inputs import Projection, Source
from moment_jax.layers.attention.tangent import AttentionTangent
from moment_jax.layers.params import AttentionParams

S = TypeVar("S", bound=Covariance)


class KeyValueCache(NamedTuple):
    """Moments of the tokens so far, their keys and values, in buffers of a fixed length S."""

    source: Source[Any]
    length: Array  # number of tokens written


def empty_cache(
    length: int, params: AttentionParams, structure: type[Covariance], dtype: jnp.dtype | type
) -> KeyValueCache:
    """Buffers for `length` tokens.

    Raises:
      ValueError: if there is no room for a token.
      TypeError: if the structure has correlated tokens.
    """
    check_cached("A cache", structure)
    if length < 1:
        raise ValueError(
            f"A cache needs room for at least one token. Got length={length}. Use length >= 1."
        )

    def zeros(width: int) -> Projection[Any]:
        return Projection(
            jnp.zeros((length, width), dtype), structure.zeros((length, width), dtype)
        )

    sequence, key, value = (
        zeros(n)
        for n in (
            params.key.kernel.shape[0],
            params.key.kernel.shape[1],
            params.value.kernel.shape[1],
        )
    )
    return KeyValueCache(Source(*sequence, key, value), jnp.zeros((), jnp.int32))


def attention_step(
    mean: Array,
    cov: S,
    cache: KeyValueCache,
    params: AttentionParams,
    *,
    num_heads: int,
    order: int = 2,
) -> tuple[Array, S, AttentionTangent, KeyValueCache]:
    """Causal self-attention of the newest tokens (N, D) to earlier ones and themselves.

    Tokens beyond the end of the buffers overwrite the last ones, since the length is not known while
    tracing.
    """
    new = make_source(mean, cov, params)

    def write(buffer: Array, rows: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(
            buffer, rows.astype(buffer.dtype), cache.length, axis=0
        )

    source = jax.tree.map(write, cache.source, new)
    places = cache.length + jnp.arange(mean.shape[0])
    mask = jnp.arange(source.mean.shape[0])[None, :] <= places[:, None]
    view = View(num_heads, mask, order, own=True, places=places)
    out_mean, out_cov, tangent = attend(mean, cov, source, params, view)
    cache = KeyValueCache(source, cache.length + mean.shape[0])
    return out_mean, out_cov, tangent, cache


def check_cached(name: str, structure: type[Covariance]) -> None:
    """Raise unless tokens are independent in this structure."""
    if not structure.independent_tokens:
        names = " or ".join(s.__name__ for s in STRUCTURES.values() if s.independent_tokens)
        raise TypeError(
            f"{name} needs a structure in which tokens are independent, {names}. Got "
            f"{structure.__name__}, whose tokens are correlated: a step would cost as much as all "
            "pairs of tokens. Run the whole pass on all tokens so far."
        )
