"""Curvature factors of layers: the statistics of a backward pass, as operators that can be averaged.

A factor holds averages over a batch. L counts the layers of a stack (1 for a single layer), N the
examples, T the tokens. `weight` is 1 for new factors and 0 where none were taken.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Shape = tuple[int, ...]


class KroneckerFactor(NamedTuple):
    """F = inputs (x) outputs, of a dense layer."""

    inputs: Array  # (L, rows, rows): the average of a a^T, with a one appended to a for the bias
    outputs: Array  # (L, columns, columns): the sum of g g^T over all rows, divided by N
    weight: Array  # ()


class EmbeddingFactor(NamedTuple):
    """F = diag(frequencies) (x) outputs, of a table whose inputs are one-hot."""

    frequencies: Array  # (L, rows)
    outputs: Array  # (L, columns, columns)
    weight: Array  # ()


class DiagonalFactor(NamedTuple):
    """The diagonal of F, of a normalisation."""

    squares: Array  # (L, rows, columns)
    weight: Array  # ()


class RowFactor(NamedTuple):
    """The exact F of the examples: 1/N sum_n J_n <J_n, V>, J_n = sum_t a_nt g_nt^T."""

    inputs: Array  # (L, N, T, rows)
    outputs: Array  # (L, N, T, columns)
    weight: Array  # ()


Factor = KroneckerFactor | EmbeddingFactor | DiagonalFactor | RowFactor
Factors = dict[str, Factor]


def shapes_of(kind: type, rows: int, columns: int, tokens: Shape = ()) -> tuple[Shape, ...]:
    """The shapes of the arrays of one layer's factor; `tokens` are the middle axes of a `RowFactor`."""
    if kind is RowFactor:
        return (*tokens, rows), (*tokens, columns)
    if kind is DiagonalFactor:
        return ((rows, columns),)
    return (rows, rows) if kind is KroneckerFactor else (rows,), (columns, columns)


def apply_curvature(factor: Factor, matrix: Array) -> Array:
    """F V, (L, rows, columns), for every layer of a stack, without forming F.

    Source: Brownian document, Algorithm 1, function FV without its damping.
    """
    if isinstance(factor, KroneckerFactor):
        return jnp.matmul(jnp.matmul(factor.inputs, matrix), factor.outputs)
    if isinstance(factor, EmbeddingFactor):
        return factor.frequencies[:, :, None] * jnp.matmul(matrix, factor.outputs)
    if isinstance(factor, DiagonalFactor):
        return factor.squares * matrix
    inner = jnp.einsum("lnta,lao,lnto->ln", factor.inputs, matrix, factor.outputs)
    inner = inner / factor.inputs.shape[1]
    return jnp.einsum("ln,lnta,lnto->lao", inner, factor.inputs, factor.outputs)


def quadratic_form(factor: Factor, matrix: Array) -> Array:
    """<V, F V>, summed over the layers of a stack."""
    if isinstance(factor, KroneckerFactor):
        # <A V, V G>: XLA for CPU would fuse the last product of A V G into the sum, six times as slow.
        return jnp.sum(jnp.matmul(factor.inputs, matrix) * jnp.matmul(matrix, factor.outputs))
    return jnp.sum(matrix * apply_curvature(factor, matrix))


def averaged(average: Factor, new: Factor, decay: Array, finite: Array) -> Factor:
    """The exponential average with one more factor; unchanged where the new one has no weight.

    It is bias-corrected: the average is divided by the sum of the weights so far, kept as its weight.
    Correcting at reading time instead would store every factor twice.
    """
    take = (new.weight > 0) & finite
    share = jnp.where(take, 1 - decay, 0).astype(average.weight.dtype)
    weight = average.weight + share * (1 - average.weight)
    step = share / jnp.where(weight > 0, weight, 1)

    def mix(old: Array, fresh: Array) -> Array:
        # `where`, because a factor that is not taken may hold NaN.
        return jnp.where(take, old + step.astype(old.dtype) * (fresh.astype(old.dtype) - old), old)

    mixed: Any = jax.tree.map(mix, average, new)
    return mixed._replace(weight=weight)
