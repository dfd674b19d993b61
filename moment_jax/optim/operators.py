"""Curvature blocks as linear operators on (L, rows, columns) matrices, and their running averages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from moment_jax.optim.factors import (
    DiagonalFactor,
    EmbeddingFactor,
    Factor,
    KroneckerFactor,
    RowFactor,
)
from moment_jax.xla import diagonal_of

Array = jax.Array


def apply_curvature(factor: Factor, matrix: Array) -> Array:
    """F V for every layer of a stack, without forming F.

    Args:
      factor: of L layers.
      matrix: V, (L, rows, columns).

    Source: Brownian document, Algorithm 1, function FV without its damping.
    """
    if isinstance(factor, KroneckerFactor):
        return _kronecker(factor.inputs, matrix, factor.outputs)
    if isinstance(factor, EmbeddingFactor):
        return factor.frequencies[:, :, None] * jnp.matmul(matrix, factor.outputs)
    if isinstance(factor, DiagonalFactor):
        return factor.squares * matrix
    inner = jnp.einsum("lnta,lao,lnto->ln", factor.inputs, matrix, factor.outputs)
    inner = inner / factor.inputs.shape[1]
    return jnp.einsum("ln,lnta,lnto->lao", inner, factor.inputs, factor.outputs)


def quadratic_form(factor: Factor, matrix: Array) -> Array:
    """<V, F V> of all layers of a stack together.

    Of a Kronecker product it is <A V, V G>: XLA for CPU would take the last product of A V G into the
    sum, where a stack of matrices is six times as slow.
    """
    if isinstance(factor, KroneckerFactor):
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
    inputs = (
        factor.frequencies if isinstance(factor, EmbeddingFactor) else diagonal_of(factor.inputs)
    )
    return inputs[:, :, None] * outputs[:, None, :]


def averaged(average: Factor, new: Factor, decay: Array, finite: Array) -> Factor:
    """The exponential average with one more factor; as it is where the new one has no weight.

    Its weight is the sum of all weights so far, and it is over that sum, so that nothing pulls it to
    zero at first. Corrected only when it is read, it would be there twice.
    """
    take = (new.weight > 0) & finite
    share = jnp.where(take, 1 - decay, 0).astype(average.weight.dtype)
    weight = average.weight + share * (1 - average.weight)
    step = share / jnp.where(weight > 0, weight, 1)

    def mix(old: Array, fresh: Array) -> Array:
        # A factor that is not taken may hold anything.
        return jnp.where(take, old + step.astype(old.dtype) * (fresh.astype(old.dtype) - old), old)

    arrays = [mix(old, fresh) for old, fresh in zip(average[:-1], new[:-1], strict=True)]
    kind: Any = type(average)
    return kind(*arrays, weight)


def _kronecker(inputs: Array, matrix: Array, outputs: Array) -> Array:
    return jnp.matmul(jnp.matmul(inputs, matrix), outputs)
