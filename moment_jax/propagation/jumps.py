"""Piecewise linear functions, also those that jump: where they bend and jump, and how."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.propagation.regions import BENDING, Univariate

_MOST = 32  # places at which a function bends or jumps


class Pieces(NamedTuple):
    """A piecewise linear function: a continuous one and steps.

    The first three are those of `expectations.piecewise_linear`; without bends, `value` is that at zero.
    """

    bends: list[float]
    slopes: list[float]
    value: float
    steps: list[tuple[float, float]]  # the place and height of each jump


def at(fn: Callable[[Array], Array], x: Any, found: Univariate) -> np.ndarray:
    """Values of one of the function's parts at numbers of the source's precision."""
    with jax.ensure_compile_time_eval():
        padded = np.resize(x, -(-len(x) // 256) * 256)  # operations compile once for each shape
        values = jax.vmap(fn)(jnp.asarray(padded, found.source.dtype))
        return np.asarray(values, float)[: len(x)]


def breaks(found: Univariate) -> np.ndarray | None:
    """Where a function bends or jumps, in order; None if at more places than `_MOST`.

    There one of its comparisons, steps or bends changes sides. This shows between points far apart too,
    where the function itself would show nothing.
    """
    if not found.operations & BENDING:
        return np.zeros(0)
    eps = float(jnp.finfo(found.source.dtype).eps)
    x = np.geomspace(1e-4, 1e4, 120)
    x = at(lambda x: x, np.concatenate([-x[::-1], [0.0], x]), found)
    sides = at(found.sides, x, found)
    while True:
        changed = (sides[1:] != sides[:-1]).any(1)
        wide = np.diff(x) > 2 * eps * (np.abs(x[1:]) + 1e-3)
        cells = np.flatnonzero(changed & wide)
        if len(cells) > 2 * _MOST:
            return None
        if not len(cells):
            break
        middle = at(lambda x: x, (x[cells] + x[cells + 1]) / 2, found)
        new = at(found.sides, middle, found)
        x, order = np.unique(np.concatenate([x, middle]), return_index=True)
        sides = np.concatenate([sides, new])[order]
    places = ((x[1:] + x[:-1]) / 2)[changed]
    places = np.where(np.abs(places) < 2e-3 * eps, 0.0, places)
    apart = np.diff(places, prepend=-np.inf) > 16 * eps * (np.abs(places) + 1e-3)
    return places[apart] if apart.sum() <= _MOST else None


def pieces_of(found: Univariate, places: np.ndarray) -> Pieces | None:
    """The pieces of a function that is linear between these places, or None."""
    close = min(1e3 * found.eps, 0.02)
    first, last = (places[0], places[-1]) if len(places) else (0.0, 0.0)
    away = np.geomspace(1e-3, 1e4, 16)
    x: Any = [
        first - away * max(1, abs(first))
    ]  # points of each piece, first next to one of its ends
    x += [low + (high - low) * np.linspace(0.02, 0.98, 16) for low, high in pairwise(places)]
    x += [last + away * max(1, abs(last))] if len(places) else []
    x = at(lambda x: x, np.concatenate(x), found)
    y = at(found.fn, x, found).reshape(-1, 16)
    x = x.reshape(-1, 16)
    if not np.isfinite(y).all():
        return None
    slope = (y[:, -1] - y[:, 0]) / (x[:, -1] - x[:, 0])
    steep = np.abs(slope).max()
    line = y[:, :1] + slope[:, None] * (x - x[:, :1])
    size = np.abs(y[:, :1]) + steep * (np.abs(x) + np.abs(x[:, :1]))
    if (np.abs(y - line) > close * size).any():
        return None
    slope = np.where(np.abs(slope) <= min(close, 1e-3) * steep, 0.0, slope)

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


def jumps_at(found: Univariate, places: np.ndarray | None) -> bool:
    """Whether a function jumps at one of these places, or may at too many to tell."""
    if places is None:
        return not found.operations.isdisjoint(BENDING - {"abs", "clamp", "max", "min"})
    # Across a jump a function changes by more than beside it.
    beside = 4 * found.eps * (1 + np.abs(places))
    near = np.concatenate([places + i * beside for i in (-3, -1, 1, 3)])
    a, b, c, d = at(found.fn, near, found).reshape(4, -1)
    least = min(1e3 * found.eps, 0.02) * (1 + np.abs(b) + np.abs(c))
    return bool((np.abs(c - b) > least + 2 * (np.abs(b - a) + np.abs(d - c))).any())
