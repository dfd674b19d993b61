"""Piecewise linear functions that jump, such as comparisons: where they do, and their moments."""

import itertools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.stats import norm

from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.expectations import ElementwiseMoments

JUMPING = {
    "ceil", "eq", "floor", "ge", "gt", "is_finite", "le", "lt", "ne", "not",
    "rem", "round", "select_n", "sign",
}  # fmt: skip
_FAR = 40.0  # standardised; the density is zero there


def jumps(fn: Callable[[Array], Array], points: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """Where a function jumps between neighbouring points, and its values on both sides, (N, 3)."""
    operations = jax.make_jaxpr(fn)(jnp.zeros((), dtype)).eqns
    results = [x.outvars[0].aval.dtype for x in operations]
    floating = [jnp.issubdtype(found, jnp.floating) for found in results]
    names = {x.primitive.name for x in operations}
    if not names & JUMPING and all(floating):
        return np.zeros((0, 3))
    # Some operations may be less precise.
    kinds = [dtype, jnp.float32, *itertools.compress(results, floating)]
    coarse = 1e3 * max(float(jnp.finfo(kind).eps) for kind in kinds)
    eps = float(jnp.finfo(dtype).eps)

    @jax.jit
    def bisected(low: Array, high: Array) -> tuple[Array, ...]:
        def step(_: int, ends: tuple[Array, ...]) -> tuple[Array, ...]:
            low, high, at_low, at_high = ends
            middle = low + 0.5 * (high - low)
            at = jax.vmap(fn)(middle)
            left = jnp.abs(at - at_low) > jnp.abs(at_high - at)
            return (
                jnp.where(left, low, middle), jnp.where(left, middle, high),
                jnp.where(left, at_low, at), jnp.where(left, at, at_high),
            )  # fmt: skip

        return jax.lax.fori_loop(0, 60, step, (low, high, *(jax.vmap(fn)(x) for x in (low, high))))

    with jax.ensure_compile_time_eval():
        ends = bisected(jnp.asarray(points[:-1], dtype), jnp.asarray(points[1:], dtype))
        low, high, before, after = (np.asarray(x, float) for x in ends)
        found = np.abs(after - before) > coarse * (1 + np.abs(before) + np.abs(after))
        at = (low[found] + high[found]) / 2
        at = np.where(np.abs(at) < eps, 0.0, at)
        # Not at the point itself, whose value may be either.
        beside = at + 4 * eps * np.array([[-1.0], [1.0]]) * (1 + np.abs(at))
        before, after = np.asarray(jax.vmap(jax.vmap(fn))(jnp.asarray(beside, dtype)), float)
    return np.stack([at, before, after], 1)


def with_jumps(
    mean: Array, variance: Array, kinks: list[float], slopes: list[float], value: float,
    steps: Sequence[tuple[float, float]],
) -> ElementwiseMoments:  # fmt: skip
    """Moments of a piecewise linear function of x ~ N(m, v): continuous ones plus steps.

    `kinks`, `slopes` and `value` are those of `expectations.piecewise_linear`; without kinks, `value` is
    that at zero. `steps` are pairs, the place and height of each jump. Exact: sums of the moments of the
    normal distribution truncated to each piece; a step of height c adds c times the density to the gain.
    """
    scale = safe_sqrt(variance)
    random = variance > float(jnp.finfo(mean.dtype).tiny) ** (2 / 3)
    inverse = jnp.where(random, safe_divide(jnp.ones_like(scale), scale), 0)

    def edge(t: float) -> Array:
        """The place t in units of the noise; all of it lies on one side if there is none."""
        far = jnp.where(mean > t, -_FAR, _FAR)
        z = (t - mean) * inverse
        return jnp.where(random & (jnp.abs(z) < _FAR), z, far)

    where = sorted({*kinks, *(float(t) for t, _ in steps)})
    edges = [jnp.full_like(mean, -_FAR), *map(edge, where), jnp.full_like(mean, _FAR)]
    below, density = [norm.cdf(z) for z in edges], [norm.pdf(z) for z in edges]
    pieces = []  # slope, value at the mean, and the moments of z of order 0, 1 and 2
    inside: list[Any] = [where[0] - 1, *map(np.mean, pairwise(where)), where[-1] + 1]
    for i, middle in enumerate(inside):
        bends = [(c, t) for c, t in zip(np.diff(slopes), kinks, strict=True) if t < middle]
        slope = slopes[0] + sum(c for c, _ in bends)
        start = kinks[0] if kinks else 0.0
        shift = value - slopes[0] * start - sum(c * t for c, t in bends)
        shift = shift + sum(c for t, c in steps if t < middle)
        first = density[i] - density[i + 1]
        inner = below[i + 1] - below[i]
        second = inner + edges[i] * density[i] - edges[i + 1] * density[i + 1]
        pieces.append((slope, shift + slope * mean, inner, first, second))
    out: Any = sum(a * m0 + b * scale * m1 for b, a, m0, m1, _ in pieces)
    at = {t: (z, p) for t, z, p in zip(where, edges[1:-1], density[1:-1], strict=True)}
    gain: Any = sum(b * m0 for b, _, m0, _, _ in pieces)
    gain = gain + sum(c * at[float(t)][1] * inverse for t, c in steps)
    bent: Any = sum(c * scale * at[t][1] for c, t in zip(np.diff(slopes), kinks, strict=True))
    bent = bent + sum(c * at[float(t)][0] * at[float(t)][1] for t, c in steps)
    second = jnp.asarray(bent * 0.5**0.5)
    total = sum(
        (a - out) ** 2 * m0 + 2 * (a - out) * b * scale * m1 + (b * scale) ** 2 * m2
        for b, a, m0, m1, m2 in pieces
    )
    least = gain**2 * variance + second**2
    return ElementwiseMoments(out, jnp.maximum(total, least), gain, second)
