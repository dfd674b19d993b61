"""Factors, inverses and log-determinants of symmetric matrices, singular ones included.

On CPU without LAPACK: jaxlib distributes a batch of its calls over the threads that already run it and
waits, so that as many concurrent batches as there are threads hang; and the threads of its OpenBLAS
spin beside XLA's, so that eight triangular systems of 64 rows took 150 ms for 0.4. Nor does LAPACK go on
after a pivot that is not positive, whose column is skipped here.

A function takes one matrix (n, n); stacks go through `jax.vmap`. NaN stays NaN.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.xla import diagonal_of, inlined

_PANEL = 16  # columns of a factor at a time: less memory traffic, and one program for all of them
_LEAF = 40  # up to this many rows are eliminated one by one; wider matrices are halved
_MOST_LEAVES = 16  # of any matrix, so that programs do not grow with its width

Pair = tuple[Array, Array]
dot = functools.partial(jnp.matmul, precision="highest")  # inverses amplify bfloat16's rounding


@functools.partial(inlined, static_argnames="bounded")
def psd_cholesky(cov: Array, *, bounded: bool = False) -> Array:
    """Lower-triangular L with L L^T = cov for any positive semidefinite matrix, without jitter.

    Columns whose pivot is zero up to rounding are zero; no row depends on later ones. Derivatives are
    right where the matrix is positive definite. With `bounded`, no entry exceeds what its row has left
    of the diagonal: then L L^T of an indefinite matrix is a semidefinite one near it, whose diagonal is
    the same up to rounding.
    """
    size, width = len(cov), min(len(cov), _PANEL)
    padding = -size % width
    cov = jnp.pad(cov, (0, padding))
    own, rows = diagonal_of(cov), jnp.arange(size + padding)
    least = size * jnp.finfo(cov.dtype).eps * own

    def panel_of(first: Array | int, left: Array, rest: Array) -> Array:
        """The next columns, from what the ones before leave of the matrix and of its diagonal."""

        def add_column(j: Array, panel: Array) -> Array:
            row = first + j
            column = left[:, j] - dot(panel, panel[row])
            usable = ~(column[row] <= least[row])  # written so that NaN stays NaN
            column = column / jnp.sqrt(jnp.where(usable, column[row], 1))
            if bounded:
                most = jnp.sqrt(jnp.maximum(rest - jnp.sum(panel**2, axis=1), 0))
                column = jnp.clip(column, -most, most)
            return panel.at[:, j].set(jnp.where(usable & (rows >= row), column, 0))

        return jax.lax.fori_loop(0, width, add_column, jnp.zeros_like(left))

    def add_panel(k: Array, root: Array) -> Array:
        first = k * width
        before = jax.lax.dynamic_slice_in_dim(root, first, width)
        left = jax.lax.dynamic_slice_in_dim(cov, first, width, axis=1) - dot(root, before.T)
        panel = panel_of(first, left, own - jnp.sum(root**2, axis=1))
        return jax.lax.dynamic_update_slice_in_dim(root, panel, first, axis=1)

    count = (size + padding) // width
    if count == 1:
        return panel_of(0, cov, own)
    return jax.lax.fori_loop(0, count, add_panel, jnp.zeros_like(cov))[:size, :size]


@functools.partial(inlined, static_argnames="least")
def inverse_root(matrix: Array, least: float | None = None) -> Array:
    """R = L^-1 of a positive definite matrix L L^T, so that the inverse is R^T R.

    NaN for other matrices. With `least`, rows and columns whose pivot is at most that are left out as if
    the matrix did not have them: zero in R. On accelerators the library's, unless pivots are skipped.
    """
    leaf = max(_LEAF, len(matrix) // _MOST_LEAVES)

    def by_library(matrix: Array) -> Array:
        eye = jnp.eye(len(matrix), dtype=matrix.dtype)
        return jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(matrix), eye, lower=True)

    def by_halves(matrix: Array) -> Array:
        """[[P, 0], [-S B P, S]] with P, S of the first half and its complement."""
        if len(matrix) <= leaf:
            return _eliminated(matrix, least)
        half = len(matrix) // 2
        first = by_halves(matrix[:half, :half])
        low = dot(matrix[half:, :half], first.T)
        second = by_halves(matrix[half:, half:] - dot(low, low.T))
        upper = jnp.concatenate([first, jnp.zeros_like(matrix[:half, half:])], axis=1)
        lower = jnp.concatenate([-dot(dot(second, low), first), second], axis=1)
        return jnp.concatenate([upper, lower])

    if least is not None:
        return by_halves(matrix)
    return jax.lax.platform_dependent(matrix, cpu=by_halves, default=by_library)


def _eliminated(matrix: Array, least: float | None) -> Array:
    """The same by Gaussian elimination of (M | I), row by row."""
    n = len(matrix)
    rows = jnp.arange(n)[:, None]

    def reciprocal(pivots: Array) -> Array:
        if least is None:
            return 1 / pivots
        usable = ~(pivots <= least)
        return jnp.where(usable, 1 / jnp.where(usable, pivots, 1), 0)

    def eliminate(j: Array, joined: Array) -> Array:
        pivots = jax.lax.dynamic_slice_in_dim(joined, j, 1, axis=0)
        column = jax.lax.dynamic_slice_in_dim(joined, j, 1, axis=1)
        by = reciprocal(jax.lax.dynamic_slice_in_dim(pivots, j, 1, axis=1))
        return joined - jnp.where(rows > j, column * by, 0) * pivots

    eye = jnp.eye(n, dtype=matrix.dtype)
    joined = jax.lax.fori_loop(0, n, eliminate, jnp.concatenate([matrix, eye], axis=1))
    return joined[:, n:] * jnp.sqrt(reciprocal(diagonal_of(joined[:, :n])))[:, None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@functools.partial(jax.jit, static_argnums=1)  # so that a program holds it once
def ridge_inverse(matrix: Array, ridge: float) -> Array:
    """(M + ridge I)^-1 of a symmetric M, in float32 at least within.

    Rows and columns of which elimination leaves less than half the ridge, as in an indefinite M, are
    left out: zero in the inverse.
    """
    wide = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    root = inverse_root(wide + ridge * jnp.eye(len(matrix), dtype=wide.dtype), 0.5 * ridge)
    return dot(root.T, root).astype(matrix.dtype)


@ridge_inverse.defjvp
def _ridge_inverse_jvp(ridge: float, primals: tuple[Array], tangents: tuple[Array]) -> Pair:
    inverse = ridge_inverse(primals[0], ridge)
    return inverse, -(inverse @ tangents[0] @ inverse)


@jax.custom_jvp
def psd_logdet(cov: Array) -> Array:
    """Log-determinant of a positive semidefinite matrix: a scalar, -inf of derivative 0 if singular.

    One that is singular up to rounding may count as regular, with about log(eps) a lost dimension.
    """
    return _logdet_and_root(cov)[0]


@psd_logdet.defjvp
def _psd_logdet_jvp(primals: tuple[Array], tangents: tuple[Array]) -> Pair:
    logdet, root = _logdet_and_root(primals[0])
    return logdet, jnp.where(logdet > -jnp.inf, jnp.sum(dot(root.T, root) * tangents[0]), 0)


@inlined
def _logdet_and_root(cov: Array) -> Pair:
    """Log-determinant and inverse root; -inf and the identity where there is none."""
    root = inverse_root(cov)
    regular = jnp.all(jnp.isfinite(root)) & jnp.all(diagonal_of(root) > 0)
    root = jnp.where(regular, root, jnp.eye(len(cov), dtype=cov.dtype))
    return jnp.where(regular, -2 * jnp.sum(jnp.log(diagonal_of(root))), -jnp.inf), root
