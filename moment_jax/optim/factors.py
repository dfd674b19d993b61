"""Curvature factors of layers: statistics, linear operators and running averages.

A factor holds averages over a batch. L counts the layers of a stack (1 for a single layer), N the
examples, T the tokens. `weight` is 1 for new statistics and 0 where none were taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.xla import diagonal_of

Array = jax.Array


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


def apply_curvature(factor: Factor, matrix: Array) -> Array:
    """F V for every layer of a stack, without forming F.

    Args:
      factor: of L layers.
      matrix: V, (L, rows, columns).

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


def curvature_diagonal(factor: Factor) -> Array:
    """The diagonal of F as matrices (L, rows, columns)."""
    if isinstance(factor, DiagonalFactor):
        return factor.squares
    if isinstance(factor, RowFactor):
        gradients = jnp.einsum("lnta,lnto->lnao", factor.inputs, factor.outputs)
        return jnp.mean(gradients**2, axis=1)
    outputs = diagonal_of(factor.outputs)
    if isinstance(factor, EmbeddingFactor):
        return factor.frequencies[:, :, None] * outputs[:, None, :]
    return diagonal_of(factor.inputs)[:, :, None] * outputs[:, None, :]


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

    arrays = [mix(old, fresh) for old, fresh in zip(average[:-1], new[:-1], strict=True)]
    kind: Any = type(average)
    return kind(*arrays, weight)
