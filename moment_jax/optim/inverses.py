"""Inverses of Kronecker factors, with factored Tikhonov damping or in their eigenbasis."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.xla import diagonal_of, on_diagonal

LEAST_RELATIVE_DAMPING = 8  # rounding units of the trace, which a Cholesky factorisation needs
LEAF = 40  # up to this many rows are eliminated one by one; wider matrices are halved
MOST_LEAVES = 16  # of any matrix, so that programs do not grow with its width


class InversePair(NamedTuple):
    """(A + a I)^-1 and (G + g I)^-1 of L layers."""

    inputs: Array
    outputs: Array


class EigenPair(NamedTuple):
    """A = U diag(a) U^T and G = W diag(g) W^T of L layers; U is None where A is diagonal."""

    input_values: Array
    input_vectors: Array | None
    output_values: Array
    output_vectors: Array


@dataclasses.dataclass(frozen=True)
class Cholesky:
    """Explicit inverses of both damped factors, A + pi sqrt(gamma) I and G + sqrt(gamma)/pi I.

    pi^2 = (tr A / dim A) / (tr G / dim G). At least a few rounding units of the trace are added, so that
    float32 factors of any condition number can be inverted.
    """

    def empty(self, inputs: Array, outputs: Array) -> InversePair:
        """The state before the first inversion: zeros, so that steps are zero."""
        return InversePair(jnp.zeros_like(inputs), jnp.zeros_like(outputs))

    def refreshed(self, inputs: Array, outputs: Array, damping: Array) -> InversePair:
        """Inverses of (L, n, n) factors."""
        a, g = (jnp.mean(diagonal_of(f), axis=-1) for f in (inputs, outputs))
        tiny = jnp.finfo(a.dtype).tiny
        pi = jnp.sqrt(jnp.maximum(a, tiny) / jnp.maximum(g, tiny))
        pi = jnp.where((a > tiny) & (g > tiny), pi, 1)
        root = jnp.sqrt(damping)
        left, right = _damped(inputs, pi * root), _damped(outputs, root / pi)
        return InversePair(self.inverse(left), self.inverse(right))

    def inverse(self, matrix: Array) -> Array:
        """Inverses of positive definite matrices (L, n, n)."""
        return inverted(matrix)

    def apply(self, inverses: InversePair, grad: Array, damping: Array) -> Array:
        """Both inverses applied to a gradient (L, rows, columns), damped as of their last refresh."""
        del damping
        return jnp.matmul(jnp.matmul(inverses.inputs, grad), inverses.outputs)


@dataclasses.dataclass(frozen=True)
class Eigh:
    """Eigenbases of both factors, which invert A (x) G + gamma I exactly, with the current gamma.

    Costs two more products per step than `Cholesky` and a slower refresh.
    """

    def empty(self, inputs: Array, outputs: Array) -> EigenPair:
        """The state before the first inversion, as for `Cholesky`."""
        return EigenPair(*no_eigenbases(inputs), *no_eigenbases(outputs))

    def refreshed(self, inputs: Array, outputs: Array, damping: Array) -> EigenPair:
        """Eigenbases of (L, n, n) factors."""
        del damping
        return EigenPair(*eigenbases(inputs), *eigenbases(outputs))

    def apply(self, inverses: EigenPair, grad: Array, damping: Array) -> Array:
        """(A (x) G + gamma I)^-1 applied to a gradient (L, rows, columns)."""
        u, w = inverses.input_vectors, inverses.output_vectors
        values = inverses.input_values[:, :, None] * inverses.output_values[:, None, :] + damping
        rotated = grad if u is None else jnp.matmul(jnp.swapaxes(u, 1, 2), grad)
        scaled = divided(jnp.matmul(rotated, w), values)
        scaled = scaled if u is None else jnp.matmul(u, scaled)
        return jnp.matmul(scaled, jnp.swapaxes(w, 1, 2))


@dataclasses.dataclass(frozen=True)
class NewtonSchulz(Cholesky):
    """The inverses of `Cholesky` by matrix products only: X <- X (2 I - M X), starting at 1/|M|.

    For accelerators on which only products are fast. It takes about 2 log2 of the condition number of
    the damped factor.

    Args:
      iterations: at least 1.
    """

    iterations: int = 20

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"`NewtonSchulz` needs iterations >= 1. Got {self.iterations}.")

    def inverse(self, matrix: Array) -> Array:
        """Inverses of positive definite matrices (L, n, n)."""
        eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)[None]
        # The largest row sum bounds the largest eigenvalue.
        bound = jnp.max(jnp.sum(jnp.abs(matrix), axis=-1), axis=-1)[:, None, None]

        def improve(_: int, x: Array) -> Array:
            return jnp.matmul(x, 2 * eye - jnp.matmul(matrix, x))

        return jax.lax.fori_loop(0, self.iterations, improve, eye / bound)


Inversion = Cholesky | Eigh


def divided(array: Array, by: Array) -> Array:
    """The quotient, or 0 where `by` is not positive: no step without curvature or damping."""
    return jnp.where(by > 0, array / jnp.where(by > 0, by, 1), 0)


def _damped(factor: Array, damping: Array) -> Array:
    """Factors (L, n, n) plus `damping` (L,), or what a factorisation needs if that is more."""
    trace = jnp.sum(diagonal_of(factor), axis=-1)
    unit = jnp.finfo(trace.dtype).eps
    least = jnp.where(trace > 0, LEAST_RELATIVE_DAMPING * unit * trace, 1)
    added = jnp.maximum(damping.astype(trace.dtype), least)
    return factor + jnp.where(on_diagonal(factor.shape), added[:, None, None], 0)


def no_eigenbases(matrices: Array) -> tuple[Array, Array]:
    """Zeros like what `eigenbases` returns."""
    return jnp.zeros(matrices.shape[:-1], matrices.dtype), jnp.zeros_like(matrices)


def eigenbases(matrices: Array) -> tuple[Array, Array]:
    """Eigenvalues, clipped at 0, and eigenvectors of (L, n, n); on CPU one matrix after another.

    On CPU jaxlib (0.10.2) distributes a batch of LAPACK calls over the threads that already run it, and
    waits: as many concurrent batches as there are threads deadlock.
    """
    values, vectors = jax.lax.platform_dependent(
        matrices, cpu=partial(jax.lax.map, jnp.linalg.eigh), default=jnp.linalg.eigh
    )
    return jnp.maximum(values, 0), vectors


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
