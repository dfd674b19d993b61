"""Moments of queries, keys and values, which every structure's attention takes."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance, Separable
from moment_jax.layers.params import DenseParams

S = TypeVar("S", bound=Covariance)


# Per-token matrices (T, K, K) that multiply every head's queries and keys.
Turns = tuple[Array | None, Array | None]


class Projection(NamedTuple, Generic[S]):
    """Moments of all heads' queries (or keys, or values): mean (T, H K) and covariance."""

    mean: Array
    cov: S


class SharedInput(NamedTuple, Generic[S]):
    """The random input of keys and values, and in self-attention of queries too.

    Their weights are independent, so Cov[q, k] = query_kernel^T Cov[x] key_kernel, and so on.
    """

    cov: S
    query_kernel: Array | None  # (D, H K), mean; None if queries come from another sequence
    key_kernel: Array  # (D, H K)
    value_kernel: Array  # (D, H K)
    turns: Turns


class DenseInput(NamedTuple, Generic[S]):
    """A random sequence and the dense layer that makes queries, keys or values from it."""

    mean: Array  # (T, D)
    cov: S
    params: DenseParams  # (D, H K)


class Inputs(NamedTuple, Generic[S]):
    """Everything that a structure's attention needs."""

    query: Projection[S]
    key: Projection[S]
    value: Projection[S]
    query_input: DenseInput[S]
    key_input: DenseInput[S]
    value_input: DenseInput[S]
    shared: SharedInput[S]
    output: DenseParams  # the output projection, (H K, D)
    mask: Array | None  # (H, T, S) boolean, True where a query may look
    num_heads: int
    order: int

    def centres(self) -> Centres:
        """Means of all heads' queries, keys and values, leading axis H."""
        parts = (self.query, self.key, self.value)
        return Centres(*(split_heads(part.mean, self.num_heads) for part in parts))

    def num_scores(self) -> int:
        """H T S."""
        return self.num_heads * self.query.mean.shape[0] * self.key.mean.shape[0]


class Centres(NamedTuple):
    """One head's mean queries, keys and values."""

    query: Array  # (T, K)
    key: Array  # (S, K)
    value: Array  # (S, K)


class Mixing(NamedTuple):
    """How the heads mixed the tokens."""

    weights: Any  # mean attention weights, (H, T, S); None in `Diagonal`, which keeps only `own`
    gain: Array | None = None  # fraction of the softmax's Jacobian kept, (H, T); None for 1
    own: Array | None = None  # each query's weight on its own token, (H, T); in `Diagonal`

    def num_heads(self) -> int:
        """H."""
        known: Any = self.own if self.weights is None else self.weights
        return len(known)


def split_heads(array: Array, num_heads: int) -> Array:
    """(T, H K) -> (H, T, K), heads outermost in the features."""
    t, width = array.shape
    return array.reshape(t, num_heads, width // num_heads).swapaxes(0, 1)


def turned(array: Array, turn: Array | None) -> Array:
    """All heads' queries or keys, (T, H K), each token multiplied by its (K, K) matrix."""
    if turn is None:
        return array
    heads = array.reshape(array.shape[0], -1, turn.shape[1])
    return jnp.einsum("thj,tjk->thk", heads, turn).reshape(array.shape)


def turned_projection(
    projection: Projection[S], turn: Array | None, num_heads: int
) -> Projection[S]:
    """The turned moments; `Separable` keeps its noise, which is right if paired entries are alike."""
    if turn is None or isinstance(projection.cov, Separable):
        return projection._replace(mean=turned(projection.mean, turn))
    t, k, _ = turn.shape
    eye = jnp.eye(num_heads, dtype=turn.dtype)
    whole = jnp.einsum("hg,tjk->thkgj", eye, turn).reshape(t, num_heads * k, num_heads * k)
    unit = jnp.broadcast_to(jnp.eye(num_heads * k, dtype=turn.dtype), whole.shape)
    cov = projection.cov.map_low_rank(jnp.zeros_like(projection.mean), whole, unit)
    return Projection(turned(projection.mean, turn), cov)


def root_width(array: Array) -> Array:
    """The square root of the head width K, of (..., K)."""
    return jnp.sqrt(jnp.asarray(array.shape[-1], array.dtype))


def merge_heads(array: Array) -> Array:
    """(H, T, K) -> (T, H K)."""
    h, t, k = array.shape
    return array.swapaxes(0, 1).reshape(t, h * k)
