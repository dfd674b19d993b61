"""Piecewise linear functions, also those that jump: where they bend and jump, and their moments."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.stats import norm

from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.expectations import ElementwiseMoments
from moment_jax.propagation.regions import BENDING, Univariate

_MOST = 32  # places at which a function bends or jumps
_FAR = 40.0  # standardised; the density is zero there


class Pieces(NamedTuple):
    """A piecewise linear function: a continuous one and steps.

    The first three are those of `expectations.piecewise_linear`; without bends, `value` is that at zero.
    """

    bends: list[float]
    slopes: list[float]
    value: float
    steps: list[tuple[float, float]]  # the place and height of each jump


def at(fn: Callable[[Array], Array], x: Any, found: Univariate, dtype: jnp.dtype) -> np.ndarray:
    """A function's values at numbers of the source's precision."""
    with jax.ensure_compile_time_eval():
        padded = np.resize(x, -(-len(x) // 256) * 256)  # of one shape, for which operations compile once
        padded = jnp.asarray(jnp.asarray(padded, found.source.dtype), dtype)
        return np.asarray(jax.vmap(fn)(padded), float)[: len(x)]


def breaks(found: Univariate, dtype: jnp.dtype) -> np.ndarray | None:
    """Where a function bends or jumps, in order; None if at more places than `_MOST`.

    There one of its comparisons, steps or bends changes sides. This shows between points far apart too,
    where the function itself would show nothing.
    """
    if not found.operations & BENDING:
        return np.zeros(0)
    eps = _resolution(found, dtype)
    x = np.geomspace(1e-4, 1e4, 120)
    x = at(lambda x: x, np.concatenate([-x[::-1], [0.0], x]), found, dtype)
    sides = at(found.sides, x, found, dtype)
    while True:
        changed = (sides[1:] != sides[:-1]).any(1)
        wide = np.diff(x) > 2 * eps * (np.abs(x[1:]) + 1e-3)
        cells = np.flatnonzero(changed & wide)
        if len(cells) > 2 * _MOST:
            return None
        if not len(cells):
            break
        middle = at(lambda x: x, (x[cells] + x[cells + 1]) / 2, found, dtype)
        new = at(found.sides, middle, found, dtype)
        x, order = np.unique(np.concatenate([x, middle]), return_index=True)
        sides = np.concatenate([sides, new])[order]
    places = ((x[1:] + x[:-1]) / 2)[changed]
    places = np.where(np.abs(places) < 2e-3 * eps, 0.0, places)
    apart = np.diff(places, prepend=-np.inf) > 16 * eps * (np.abs(places) + 1e-3)
    return places[apart] if apart.sum() <= _MOST else None


def pieces_of(found: Univariate, places: np.ndarray, dtype: jnp.dtype) -> Pieces | None:
    """The pieces of a function that is linear between these places, or None."""
    close = min(1e3 * found.eps, 0.02)
    x: Any = []  # points of each piece, first next to one of its ends
    for low, high in pairwise([-np.inf, *places, np.inf]):
        end = max([1.0, *(abs(t) for t in (low, high) if np.isfinite(t))])
        away = np.geomspace(1e-3, 1e4, 16) * end
        if np.isfinite(low) and np.isfinite(high):
            x.append(low + (high - low) * np.linspace(0.02, 0.98, 16))
        elif np.isfinite(high) or np.isfinite(low):
            x.append(low + away if np.isfinite(low) else high - away)
        else:
            x.append(np.concatenate([[0.0], -away[::2], away[1::2]])[:16])
    x = at(lambda x: x, np.concatenate(x), found, dtype)
    y = at(found.fn, x, found, dtype).reshape(-1, 16)
    x = x.reshape(-1, 16)
    slope = (y[:, -1] - y[:, 0]) / (x[:, -1] - x[:, 0])
    steep = np.abs(slope).max()
    line = y[:, :1] + slope[:, None] * (x - x[:, :1])
    size = np.abs(y[:, :1]) + steep * (np.abs(x) + np.abs(x[:, :1]))
    if not np.isfinite(y).all() or (np.abs(y - line) > close * size).any():
        return None
    slope = np.where(np.abs(slope) <= close * steep, 0.0, slope)

    def value(i: int, t: float) -> float:
        return float(y[i, 0] + slope[i] * (t - x[i, 0]))

    bends, slopes, steps = [], [float(slope[0])], []
    for i, t in enumerate(map(float, places)):
        before, after = value(i, t), value(i + 1, t)
        if abs(after - before) > close * (abs(before) + abs(after) + steep * (abs(t) + 1e-3)):
            steps.append((t, after - before))
        if abs(slope[i + 1] - slopes[-1]) > close * steep:
            bends.append(t)
            slopes.append(float(slope[i + 1]))
    return Pieces(bends, slopes, value(0, bends[0] if bends else 0.0), steps)


def jumps_at(found: Univariate, places: np.ndarray | None, dtype: jnp.dtype) -> bool:
    """Whether a function jumps at one of these places, or may at too many to tell."""
    if places is None:
        return not found.operations.isdisjoint(BENDING - {"abs", "clamp", "max", "min"})
    beside = 4 * _resolution(found, dtype) * (1 + np.abs(places))
    before, after = at(found.fn, np.concatenate([places - beside, places + beside]), found, dtype).reshape(2, -1)
    close = min(1e3 * found.eps, 0.02)
    return bool((np.abs(after - before) > close * (1 + np.abs(before) + np.abs(after))).any())


def _resolution(found: Univariate, dtype: jnp.dtype) -> float:
    """Relative distance of the numbers at which a function is evaluated."""
    return max(float(jnp.finfo(kind).eps) for kind in (found.source.dtype, dtype))


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
