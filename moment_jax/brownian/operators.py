"""A chain as what it does to vectors, so that its T x T matrix need not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import sparse
from jax.tree_util import Partial

from moment_jax.brownian.checks import check_points, check_positive, check_stochastic

Array = jax.Array


class TransitionOperator(NamedTuple):
    """A transition matrix P (T, T) by its products with (T, k) arrays.

    Its rows have to be probabilities; that is not looked at, as there are no entries to look at.

    Attributes:
      forward: v -> P v, (T, k) -> (T, k): averages of functions after one step. A
        `jax.tree_util.Partial` of a function and the arrays it needs lets compiled code be used again.
      backward: p -> P^T p, (T, k) -> (T, k): distributions after one step.
      size: T.
      dtype: of the vectors.
    """

    forward: Callable[[Array], Array]
    backward: Callable[[Array], Array]
    size: int
    dtype: jnp.dtype


Transition = jax.Array | sparse.BCOO | TransitionOperator
"""What chains are given as: dense (T, T), sparse `BCOO`, or products with vectors."""


def _times(matrix: Array, vectors: Array) -> Array:
    return matrix @ vectors


def _transposed_times(matrix: Array, vectors: Array) -> Array:
    return matrix.T @ vectors


def as_operator(name: str, transition: Transition) -> TransitionOperator:
    """The products of a matrix whose rows have been checked; an operator with `Partial` products."""
    if isinstance(transition, TransitionOperator):
        forward, backward = (f if isinstance(f, Partial) else Partial(f) for f in transition[:2])
        return TransitionOperator(forward, backward, transition.size, transition.dtype)
    if not isinstance(transition, sparse.BCOO):
        transition = jnp.asarray(transition)
    size = check_stochastic(name, transition)
    forward, backward = Partial(_times, transition), Partial(_transposed_times, transition)
    return TransitionOperator(forward, backward, size, jnp.dtype(transition.dtype))


def attention_operator(
    tokens: Array, *, temperature: float | Array | None = None, rows: int = 512
) -> TransitionOperator:
    """`transition_matrix(tokens)` as products, some rows at a time: memory rows * T, not T^2.

    Args:
      tokens: (T, D).
      temperature: as in `transition_matrix`.
      rows: how many rows exist at once.

    Raises:
      ValueError: if tokens is not (T, D), or the temperature or rows is not positive.
    """
    check_points("attention_operator", tokens)
    check_positive("attention_operator", "rows", rows)
    if temperature is None:
        temperature = tokens.shape[1] ** 0.5
    check_positive("attention_operator", "temperature", temperature)
    count = tokens.shape[0]
    queries = _in_blocks(tokens, min(rows, count)) / temperature
    forward = Partial(_attend, queries, tokens)
    backward = Partial(_attend_backward, queries, tokens)
    return TransitionOperator(forward, backward, count, jnp.dtype(tokens.dtype))


def _in_blocks(rows: Array, height: int) -> Array:
    """Rows (T, k) as (blocks, height, k), zero rows at the end."""
    blocks = -(-rows.shape[0] // height)
    padded = jnp.pad(rows, ((0, blocks * height - rows.shape[0]), (0, 0)))
    return padded.reshape(blocks, height, rows.shape[1])


def _attend(queries: Array, tokens: Array, vectors: Array) -> Array:
    parts = jax.lax.map(lambda block: jax.nn.softmax(block @ tokens.T, axis=1) @ vectors, queries)
    return parts.reshape(-1, vectors.shape[1])[: vectors.shape[0]]


def _attend_backward(queries: Array, tokens: Array, vectors: Array) -> Array:
    def add(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        block, part = pair
        return total + jax.nn.softmax(block @ tokens.T, axis=1).T @ part, None

    parts = _in_blocks(vectors, queries.shape[1])
    return jax.lax.scan(add, jnp.zeros_like(vectors), (queries, parts))[0]


def lazy(transition: Transition, stay: float = 0.5) -> Transition:
    """The chain that stays where it is with probability `stay` and else steps: never periodic.

    It has the same stationary law, and eigenvalues stay + (1 - stay) lambda.

    Raises:
      ValueError: if `stay` is not positive and below 1.
    """
    if not 0 < stay < 1:
        raise ValueError(f"`lazy` needs 0 < stay < 1. Got {stay}.")
    if isinstance(transition, jax.Array):
        size = check_stochastic("lazy", transition)
        return stay * jnp.eye(size, dtype=transition.dtype) + (1 - stay) * transition
    steps = as_operator("lazy", transition)
    return steps._replace(
        forward=Partial(_mixed, stay, steps.forward), backward=Partial(_mixed, stay, steps.backward)
    )


def _mixed(stay: Array, product: Callable[[Array], Array], vectors: Array) -> Array:
    return stay * vectors + (1 - stay) * product(vectors)
