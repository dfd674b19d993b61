"""Solutions of (F + damping I) x = grad for stacks of layers: by stored inverses, and by iterations."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax import linalg
from moment_jax.optim import blocks
from moment_jax.optim.blocks import DiagonalFactor, EmbeddingFactor, Factor, KroneckerFactor
from moment_jax.xla import diagonal_of, on_diagonal

LEAST_RELATIVE_DAMPING = 8  # rounding units of the trace, which a Cholesky factorisation needs


class InversePair(NamedTuple):
    """(A + a I)^-1 and (G + g I)^-1 of L layers; of a table, eigenvalues and eigenvectors of G."""

    inputs: Array
    outputs: Array


class Inverses(NamedTuple):
    """Inverses by group of layers, and when they were computed.

    They are of running averages, which change most while they hold few batches. The intervals between
    refreshes therefore grow as 1, 2, 4, ... steps up to their full length.
    """

    pairs: dict[str, InversePair]
    age: Array  # steps since the last refresh; negative before the first
    interval: Array  # steps from the last refresh to the next


def no_inverses(averages: blocks.Factors) -> Inverses:
    """The state before the first inversion: zeros, so that steps are zero."""
    pairs = {}
    for key, factor in averages.items():
        if not isinstance(factor, DiagonalFactor):
            first = factor.outputs[:, 0] if isinstance(factor, EmbeddingFactor) else factor.inputs
            pairs[key] = InversePair(jnp.zeros_like(first), jnp.zeros_like(factor.outputs))
    return Inverses(pairs, jnp.int32(-1), jnp.int32(0))


def apply_inverse(pair: InversePair, factor: Factor, grad: Array, damping: Array) -> Array:
    """(F + damping I)^-1 applied to a gradient (L, rows, columns), with a group's stored inverse.

    Kronecker factors are damped as of their last refresh, a table's frequencies are the current ones.
    """
    if isinstance(factor, KroneckerFactor):
        return jnp.matmul(jnp.matmul(pair.inputs, grad), pair.outputs)
    assert isinstance(factor, EmbeddingFactor)  # a diagonal is divided by
    values, vectors = pair
    by = factor.frequencies[:, :, None] * values[:, None, :] + damping
    return jnp.matmul(divided(jnp.matmul(grad, vectors), by), jnp.swapaxes(vectors, 1, 2))


def refreshed(
    inverses: Inverses,
    curvature: blocks.Factors,
    damping: Array,
    fresh: Array,
    known: Array,
    every: Any,
) -> Inverses:
    """New inverses of the current averages where they are due, else the old ones.

    A layer whose inversion failed keeps its old inverse. A refresh waits for `fresh` curvature, the
    first one until it is `known`. (Choosing between two afterwards would keep both in memory.)
    """
    wanted = jnp.asarray(every, jnp.int32)
    due = (inverses.age + 1 >= jnp.minimum(inverses.interval, wanted)) & fresh
    due = ((inverses.age < 0) | due) & known

    def invert() -> dict[str, InversePair]:
        return {key: _inverted(curvature[key], damping, old) for key, old in inverses.pairs.items()}

    pairs = jax.lax.cond(due, invert, lambda: inverses.pairs)
    age = jnp.where(due, 0, inverses.age + known)
    grown = jnp.where(due, jnp.clip(2 * inverses.interval, 1, wanted), inverses.interval)
    return Inverses(pairs, age, grown)


def _inverted(factor: Factor, damping: Array, old: InversePair) -> InversePair:
    """The inverses of a group; the old ones of layers where new ones are not finite."""
    if isinstance(factor, KroneckerFactor):
        new = damped_inverses(factor.inputs, factor.outputs, damping)
    else:
        values, vectors = jax.vmap(linalg.eigh)(factor[1])
        new = InversePair(jnp.maximum(values, 0), vectors)
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
    return InversePair(_inverse(inputs, pi * root), _inverse(outputs, root / pi))


def _inverse(factor: Array, damping: Array) -> Array:
    """Inverses of (L, n, n) plus `damping` (L,), or what a factorisation needs if that is more."""
    trace = jnp.sum(diagonal_of(factor), axis=-1)
    unit = jnp.finfo(trace.dtype).eps
    least = jnp.where(trace > 0, LEAST_RELATIVE_DAMPING * unit * trace, 1)
    added = jnp.maximum(damping.astype(trace.dtype), least)
    damped = factor + jnp.where(on_diagonal(factor.shape), added[:, None, None], 0)
    root = jax.vmap(linalg.inverse_root)(damped)
    return jnp.matmul(jnp.swapaxes(root, 1, 2), root)


def divided(array: Array, by: Array) -> Array:
    """The quotient, or 0 where `by` is not positive: no step without curvature or damping."""
    return jnp.where(by > 0, array / jnp.where(by > 0, by, 1), 0)


def iterated(
    pair: InversePair | None,
    factor: Factor,
    grad: Array,
    damping: Array,
    *,
    max_iterations: int | Array,
    tolerance: float | Array,
) -> Array:
    """(F + damping I)^-1 grad of a group, by conjugate gradients.

    A pair is the preconditioner. A layer stops when its residual is at most `tolerance` times |grad|, or
    at a direction without positive finite curvature.

    `jax.scipy.sparse.linalg.cg` divides by such a curvature (NaN from a singular F without damping), and
    takes one product with F more, where one to three do.

    Source: Brownian document, Algorithm 1, with alpha_k in the updates of x and r.
    """

    def precondition(residual: Array) -> Array:
        return residual if pair is None else apply_inverse(pair, factor, residual, damping)

    def dot(left: Array, right: Array) -> Array:
        return jnp.sum(left * right, axis=(1, 2), keepdims=True)

    def unfinished(state: Any) -> Array:
        return (state[0] < max_iterations) & jnp.any(state[-1])

    def iterate(state: Any) -> Any:
        step, x, residual, direction, rho, active = state
        pushed = blocks.apply_curvature(factor, direction) + damping * direction
        curvature = dot(direction, pushed)
        active &= (curvature > 0) & jnp.isfinite(curvature) & jnp.isfinite(rho)
        alpha = rho / jnp.where(active, curvature, 1)
        x = jnp.where(active, x + alpha * direction, x)
        residual = jnp.where(active, residual - alpha * pushed, residual)
        scaled = precondition(residual)
        new = dot(residual, scaled)
        beta = new / jnp.where(rho == 0, 1, rho)
        direction = jnp.where(active, scaled + beta * direction, direction)
        active &= dot(residual, residual) > limit
        return step + 1, x, residual, direction, new, active

    limit = jnp.asarray(tolerance, grad.dtype) ** 2 * dot(grad, grad)
    direction = precondition(grad)
    first = jnp.int32(0), jnp.zeros_like(grad), grad, direction, dot(grad, direction)
    return jax.lax.while_loop(unfinished, iterate, (*first, dot(grad, grad) > limit))[1]
