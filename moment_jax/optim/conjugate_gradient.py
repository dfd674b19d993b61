"""Conjugate gradients for a stack of independent symmetric systems."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Linear = Callable[[Array], Array]
State = tuple[Any, ...]  # step, x, residual, direction, rho, active, iterations


class Solution(NamedTuple):
    """Solution of a stack of L systems."""

    x: Array  # (L, ...)
    residual: Array  # b - A x by the recursion, (L, ...)
    iterations: Array  # (L,)
    relative_residual: Array  # |b - A x| / |b|, (L,); 0 where b is zero


def _inner(left: Array, right: Array) -> Array:
    """<left, right> of each system of the stack, (L,)."""
    return jnp.sum(left * right, axis=tuple(range(1, left.ndim)))


def conjugate_gradient(
    apply: Linear,
    target: Array,
    start: Array | None = None,
    *,
    max_iterations: int | Array,
    tolerance: float | Array,
    precondition: Linear | None = None,
) -> Solution:
    """Solve A x = b for a stack of positive (semi)definite A at once.

    A system stops when its residual is at most `tolerance` times |b|, or at a direction without positive
    finite curvature; the loop ends when all systems have stopped. The start is scaled to the best
    multiple of itself, so it is never worse than zero.

    Args:
      apply: x -> A x for the whole stack.
      target: b, (L, ...).
      start: x0, (L, ...); None for zero, which saves a product.
      max_iterations: upper limit.
      tolerance: of the relative residual.
      precondition: r -> M^-1 r with a positive definite M close to A; None for none.

    Source: Brownian document, Algorithm 1, with alpha_k in the updates of x and r.

    >>> import jax.numpy as jnp
    >>> a, b = jnp.array([[[4.0, 1.0], [1.0, 3.0]]]), jnp.array([[1.0, 2.0]])
    >>> apply = lambda x: jnp.einsum("lij,lj->li", a, x)
    >>> solved = conjugate_gradient(apply, b, jnp.zeros((1, 2)), max_iterations=2, tolerance=0.0)
    >>> print(solved.x.round(4), solved.iterations)
    [[0.0909 0.6364]] [2]
    """
    precondition = precondition or (lambda residual: residual)

    def wide(scalars: Array) -> Array:
        return scalars.reshape(scalars.shape + (1,) * (target.ndim - 1))

    size = _inner(target, target)
    limit = jnp.asarray(tolerance, target.dtype) ** 2 * size
    x, residual = jnp.zeros_like(target), target
    if start is not None:
        pushed = apply(start)
        along, curvature = _inner(start, target), _inner(start, pushed)
        scale = wide(jnp.where(_usable(curvature, along), along / _nonzero(curvature), 0))
        x = jnp.where(scale == 0, 0, start * scale)
        residual = target - jnp.where(scale == 0, 0, pushed * scale)
    direction = precondition(residual)
    active = _inner(residual, residual) > limit
    counts = jnp.zeros(target.shape[:1], jnp.int32)
    first = (jnp.int32(0), x, residual, direction, _inner(residual, direction), active, counts)

    def unfinished(state: State) -> Array:
        step, *_, active, _ = state
        return (step < max_iterations) & jnp.any(active)

    def iterate(state: State) -> State:
        step, x, residual, direction, rho, active, counts = state
        pushed = apply(direction)
        curvature = _inner(direction, pushed)
        active &= _usable(curvature, rho)
        alpha = wide(jnp.where(active, rho / _nonzero(curvature), 0))
        x = x + jnp.where(alpha == 0, 0, alpha * direction)
        residual = residual - jnp.where(alpha == 0, 0, alpha * pushed)
        scaled = precondition(residual)
        new = _inner(residual, scaled)
        beta = wide(jnp.where(active, new / _nonzero(rho), 0))
        direction = jnp.where(wide(active), scaled + beta * direction, direction)
        rho, counts = jnp.where(active, new, rho), counts + active
        active &= _inner(residual, residual) > limit
        return step + 1, x, residual, direction, rho, active, counts

    _, x, residual, *_, counts = jax.lax.while_loop(unfinished, iterate, first)
    relative = jnp.where(size > 0, jnp.sqrt(_inner(residual, residual) / _nonzero(size)), 0)
    return Solution(x, residual, counts, relative)


def _usable(curvature: Array, other: Array) -> Array:
    return (curvature > 0) & jnp.isfinite(curvature) & jnp.isfinite(other)


def _nonzero(array: Array) -> Array:
    return jnp.where(array == 0, 1, array)
