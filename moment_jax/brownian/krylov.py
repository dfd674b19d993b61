"""Leading eigenpairs of a matrix by block Krylov iterations."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

STEPS = 8  # products with a block before a restart
SPARE = 4  # additional vectors, which speed up the convergence of the last pairs
RESTARTS = 300  # at most
STALLED = 4  # restarts without progress after which only rounding is left


class Eigenpairs(NamedTuple):
    """Eigenvalues (k,) by decreasing modulus, eigenvectors (T, k) in columns, |A v - lambda v| (k,)."""

    values: Array
    vectors: Array
    residuals: Array


class _State(NamedTuple):
    block: Array
    pairs: Eigenpairs
    best: Array
    stalled: Array
    restarts: Array


@partial(jax.jit, static_argnames=("count", "symmetric"))
def leading_eigenpairs(matrix: Array, *, count: int, symmetric: bool) -> Eigenpairs:
    """The `count` eigenpairs of largest modulus of a (T, T) matrix, count <= T.

    Rayleigh-Ritz on block Krylov spaces of `STEPS` products, restarted from the best Ritz vectors until
    all residuals are at rounding level. It finds multiple eigenvalues, and decomposes no T x T matrix
    unless T is so small that one such space has dimension T.

    Of a `symmetric` matrix they are real, with orthonormal vectors. Of others they are complex, with
    right eigenvectors of unit norm; a conjugate pair may be cut at `count`. That takes
    `jnp.linalg.eig`, which some accelerators lack.
    """
    size, dtype = matrix.shape[0], matrix.dtype
    width, steps = count + SPARE, STEPS
    if width * steps >= size:
        width, steps = size, 1
    tolerance = 10 * jnp.finfo(dtype).eps * max(1.0, size**0.5 / 10)
    start = jax.random.normal(jax.random.key(0), (size, width), dtype)
    kind = dtype if symmetric else jnp.result_type(dtype, jnp.complex64)

    def restart(state: _State) -> _State:
        basis, mapped = _krylov_basis(matrix, state.block, steps)
        small = basis.T @ mapped
        if symmetric:
            values, inner = jnp.linalg.eigh((small + small.T) / 2)
        else:
            values, inner = jnp.linalg.eig(small)
        order = jnp.argsort(-jnp.abs(values))[:width]
        values, inner = values[order], inner[:, order]
        vectors = basis.astype(kind) @ inner
        gaps = mapped.astype(kind) @ inner - values[None, :] * vectors
        pairs = Eigenpairs(
            values[:count], vectors[:, :count], jnp.linalg.norm(gaps, axis=0)[:count]
        )
        # A conjugate pair gives one real part and one imaginary part.
        block = vectors if symmetric else jnp.where(values.imag >= 0, vectors.real, vectors.imag)
        worst = jnp.max(pairs.residuals)
        stalled = jnp.where(worst < 0.7 * state.best, 0, state.stalled + 1)
        best = jnp.minimum(worst, state.best)
        return _State(block, pairs, best, stalled, state.restarts + 1)

    def unfinished(state: _State) -> Array:
        # Stop at a plateau only when close to the tolerance.
        rounding = (state.stalled >= STALLED) & (state.best < 1e3 * tolerance)
        return (state.best > tolerance) & ~rounding & (state.restarts < RESTARTS)

    none = Eigenpairs(
        jnp.zeros(count, kind), jnp.zeros((size, count), kind), jnp.full(count, jnp.inf, dtype)
    )
    zero = jnp.zeros((), int)
    first = _State(start, none, jnp.asarray(jnp.inf, dtype), zero, zero)
    return jax.lax.while_loop(unfinished, restart, first).pairs


def _krylov_basis(matrix: Array, block: Array, steps: int) -> tuple[Array, Array]:
    """An orthonormal basis (T, steps b) of block, A block, A^2 block ..., and A times it."""
    current = jnp.linalg.qr(block)[0]
    parts, mapped = [current], [matrix @ current]
    for i in range(1, steps):
        # Noise at rounding level: if A maps the space into itself, any new direction will do.
        noise = jax.random.normal(jax.random.key(i), block.shape, block.dtype)
        current = mapped[-1] + jnp.finfo(block.dtype).eps * noise
        known = jnp.concatenate(parts, axis=1)
        for _ in range(2):  # twice, since after one pass the rest may be pure rounding
            current = jnp.linalg.qr(current - known @ (known.T @ current))[0]
        parts.append(current)
        mapped.append(matrix @ current)
    return jnp.concatenate(parts, axis=1), jnp.concatenate(mapped, axis=1)
