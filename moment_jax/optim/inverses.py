"""Inverses of Kronecker factors with factored Tikhonov damping, and when they are refreshed.

The inverses are of running averages, which change most while they hold few batches. The intervals
between refreshes therefore grow as 1, 2, 4, ... steps up to their full length.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.optim.factors import (
    DiagonalFactor,
    EmbeddingFactor,
    Factor,
    Factors,
    KroneckerFactor,
)
from moment_jax.xla import diagonal_of, on_diagonal

LEAST_RELATIVE_DAMPING = 8  # rounding units of the trace, which a Cholesky factorisation needs
LEAF = 40  # up to this many rows are eliminated one by one; wider matrices are halved
MOST_LEAVES = 16  # of any matrix, so that programs do not grow with its width


class InversePair(NamedTuple):
    """(A + a I)^-1 and (G + g I)^-1 of L layers; of a table, eigenvalues and eigenvectors of G."""

    inputs: Array
    outputs: Array


class KFACState(NamedTuple):
    """Inverses by group of layers, and when they were computed."""

    inverses: dict[str, InversePair]
    age: Array  # steps since the last refresh; negative before the first
    interval: Array  # steps from the last refresh to the next


def no_inverses(averages: Factors) -> KFACState:
    """The state before the first inversion: zeros, so that steps are zero."""
    zeros = jnp.zeros_like
    inverses: dict[str, InversePair] = {}
    for key, factor in averages.items():
        if isinstance(factor, KroneckerFactor):
            inverses[key] = InversePair(zeros(factor.inputs), zeros(factor.outputs))
        elif isinstance(factor, EmbeddingFactor):
            inverses[key] = InversePair(zeros(factor.outputs[:, 0]), zeros(factor.outputs))
    return KFACState(inverses, jnp.int32(-1), jnp.int32(0))


def apply_inverse(inverse: Any, factor: Factor, grad: Array, damping: Array) -> Array:
    """(F + damping I)^-1 applied to a gradient (L, rows, columns), with a group's stored inverse.

    Kronecker factors are damped as of their last refresh. A table's frequencies, and diagonals, are the
    current ones, with the current damping.
    """
    if isinstance(factor, KroneckerFactor):
        return jnp.matmul(jnp.matmul(inverse.inputs, grad), inverse.outputs)
    if isinstance(factor, EmbeddingFactor):
        values, vectors = inverse
        by = factor.frequencies[:, :, None] * values[:, None, :] + damping
        return jnp.matmul(divided(jnp.matmul(grad, vectors), by), jnp.swapaxes(vectors, 1, 2))
    assert isinstance(factor, DiagonalFactor)  # rows have no inverse
    return divided(grad, factor.squares + damping)


def refreshed(
    curvature: Factors,
    damping: Array,
    fresh: Array,
    ready: Array,
    refresh_every: int | Array,
    state: KFACState,
) -> KFACState:
    """New inverses of the current averages where they are due, else the old ones.

    A layer whose inversion failed keeps its old inverse. A refresh waits for `fresh` curvature. Where
    not `ready`, the state stays as it is. (Choosing between two afterwards would keep both in memory.)
    """
    wanted = jnp.asarray(refresh_every, jnp.int32)
    due = (state.age < 0) | ((state.age + 1 >= jnp.minimum(state.interval, wanted)) & fresh)
    due = due & ready

    def invert() -> dict[str, InversePair]:
        inverses = dict(state.inverses)  # rows have none, and keep what there is
        for key, old in inverses.items():
            factor = curvature[key]
            if isinstance(factor, KroneckerFactor):
                inverses[key] = _where_finite(damped_inverses(*factor[:2], damping), old)
            elif isinstance(factor, EmbeddingFactor):
                inverses[key] = _where_finite(_eigenbases(factor.outputs), old)
        return inverses

    inverses = jax.lax.cond(due, invert, lambda: state.inverses)
    age = jnp.where(due, 0, state.age + ready)
    grown = jnp.where(due, jnp.clip(2 * state.interval, 1, wanted), state.interval)
    return KFACState(inverses, age, grown)


def _where_finite(new: InversePair, old: InversePair) -> InversePair:
    """The new arrays of every layer if all of them are finite, else the old ones."""
    finite = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in new]
    good = jnp.all(jnp.stack(finite), axis=0)

    def choose(fresh: Array, stale: Array) -> Array:
        mask = jnp.expand_dims(good, range(1, fresh.ndim))
        return jnp.where(mask, fresh, stale).astype(stale.dtype)

    return jax.tree.map(choose, new, old)


def damped_inverses(inputs: Array, outputs: Array, damping: Array) -> InversePair:
    """Inverses of A + pi sqrt(gamma) I and G + sqrt(gamma) / pi I, (L, n, n).

    pi^2 = (tr A / dim A) / (tr G / dim G). At least a few rounding units of the trace are added, so that
    float32 factors of any condition number can be inverted.
    """
    a, g = (jnp.mean(diagonal_of(f), axis=-1) for f in (inputs, outputs))
    tiny = jnp.finfo(a.dtype).tiny
    pi = jnp.sqrt(jnp.maximum(a, tiny) / jnp.maximum(g, tiny))
    pi = jnp.where((a > tiny) & (g > tiny), pi, 1)
    root = jnp.sqrt(damping)
    return InversePair(inverted(_damped(inputs, pi * root)), inverted(_damped(outputs, root / pi)))


def _damped(factor: Array, damping: Array) -> Array:
    """Factors (L, n, n) plus `damping` (L,), or what a factorisation needs if that is more."""
    trace = jnp.sum(diagonal_of(factor), axis=-1)
    unit = jnp.finfo(trace.dtype).eps
    least = jnp.where(trace > 0, LEAST_RELATIVE_DAMPING * unit * trace, 1)
    added = jnp.maximum(damping.astype(trace.dtype), least)
    return factor + jnp.where(on_diagonal(factor.shape), added[:, None, None], 0)


def divided(array: Array, by: Array) -> Array:
    """The quotient, or 0 where `by` is not positive: no step without curvature or damping."""
    return jnp.where(by > 0, array / jnp.where(by > 0, by, 1), 0)


def _eigenbases(matrices: Array) -> InversePair:
    """Eigenvalues, clipped at 0, and eigenvectors of (L, n, n); on CPU one matrix after another.

    On CPU jaxlib (0.10.2) distributes a batch of LAPACK calls over the threads that already run it, and
    waits: as many concurrent batches as there are threads deadlock.
    """
    values, vectors = jax.lax.platform_dependent(
        matrices, cpu=partial(jax.lax.map, jnp.linalg.eigh), default=jnp.linalg.eigh
    )
    return InversePair(jnp.maximum(values, 0), vectors)


def inverted(matrices: Array) -> Array:
    """Inverses of positive definite matrices (L, n, n) by Cholesky factors; NaN for other matrices.

    On CPU without LAPACK: the threads of its OpenBLAS spin beside those of XLA, so that eight triangular
    systems of 64 rows took 150 ms instead of 0.4.
    """
    half = jax.lax.platform_dependent(matrices, cpu=_inverse_root, default=_inverse_root_by_library)
    return jnp.matmul(jnp.swapaxes(half, 1, 2), half)


def _inverse_root_by_library(matrices: Array) -> Array:
    """L^-1 of M = L L^T."""
    eye = jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=matrices.dtype), matrices.shape)
    return jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(matrices), eye, lower=True)


def _inverse_root(matrices: Array) -> Array:
    """The same by products of halves, for the whole stack at once."""
    leaf = max(LEAF, matrices.shape[-1] // MOST_LEAVES)

    def root(matrix: Array) -> Array:
        size = matrix.shape[-1]
        if size <= leaf:
            return _eliminated(matrix)
        half = size // 2
        first = root(matrix[:, :half, :half])
        low = jnp.matmul(matrix[:, half:, :half], jnp.swapaxes(first, 1, 2))
        second = root(matrix[:, half:, half:] - jnp.matmul(low, jnp.swapaxes(low, 1, 2)))
        corner = -jnp.matmul(jnp.matmul(second, low), first)
        upper = jnp.concatenate([first, jnp.zeros_like(matrix[:, :half, half:])], axis=2)
        return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=2)], axis=1)

    return root(matrices)


def _eliminated(matrices: Array) -> Array:
    """The same by Gaussian elimination of (M | I), row by row, for small matrices."""
    size = matrices.shape[-1]
    eye = jnp.broadcast_to(jnp.eye(size, dtype=matrices.dtype), matrices.shape)
    below = jnp.arange(size)[None, :, None]

    def eliminate(row: Array, joined: Array) -> Array:
        pivots = jax.lax.dynamic_slice_in_dim(joined, row, 1, axis=1)
        column = jax.lax.dynamic_slice_in_dim(joined, row, 1, axis=2)
        pivot = jax.lax.dynamic_slice_in_dim(pivots, row, 1, axis=2)
        return joined - jnp.where(below > row, column / pivot, 0) * pivots

    joined = jax.lax.fori_loop(0, size, eliminate, jnp.concatenate([matrices, eye], axis=2))
    return joined[..., size:] * jax.lax.rsqrt(diagonal_of(joined[..., :size]))[..., None]
