"""Elementwise functions of one random array, recognised by their values."""

import functools
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax import expectations
from moment_jax.expectations import ElementwiseMoments
from moment_jax.propagation.errors import refuse, register
from moment_jax.propagation.graph import Node
from moment_jax.propagation.jumps import jumps, with_jumps
from moment_jax.propagation.moments import Moments
from moment_jax.propagation.propagator import Propagator, pattern
from moment_jax.propagation.regions import univariate

Transform = Callable[[Array, Array], ElementwiseMoments]  # of mean and variance


@pattern
def _univariate(propagator: Propagator, node: Node) -> Moments | None:
    found = univariate(node)
    if found is None:
        return None
    source, fn = found
    x = propagator.moments(source).sequence()
    mean, cov = x.mean, x.cov
    name, transform = recognised(fn, mean.dtype, node)
    if transform is None:
        values = values_of(fn, mean.dtype)
        gain = jnp.full((1, mean.shape[1]), values[ONE] - values[ZERO], mean.dtype)
        out, out_cov = mean * gain + jnp.asarray(values[ZERO], mean.dtype), cov.rescale(gain)
    else:
        moments = transform(mean, cov.variance())
        gain, out, out_cov = moments.gain, moments.mean, cov.elementwise(moments)
    propagator.note(node, name, "" if transform is None else "its input Gaussian")
    return x.changed(out, out_cov, node.shape, lambda cross: cross.rescale(gain))


# A function is recognised by its values at these points, evaluated in one go.
POINTS = np.concatenate(
    [
        np.linspace(-6, 6, 49),
        -np.geomspace(8, 1e4, 12)[::-1],
        np.geomspace(8, 1e4, 12),
        np.linspace(-32, 32, 257) + 1 / 16,
    ]
)
NEAR, NEAR_OR_FAR, EVEN = slice(0, 49), (slice(0, 49), slice(49, 73)), slice(73, None)
ZERO, ONE = 24, 28
FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Transform]] = {
    "relu": (lambda x: np.maximum(x, 0), expectations.rectified),
    "gelu": (lambda x: x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2)), expectations.gelu),
}


def values_of(fn: Callable[[Array], Array], dtype: jnp.dtype) -> np.ndarray:
    """The function at `POINTS`."""
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.vmap(fn)(jnp.asarray(POINTS, dtype)), float)


def recognised(
    fn: Callable[[Array], Array], dtype: jnp.dtype, node: Node
) -> tuple[str, Transform | None]:
    """The name of the function by which `node` is made, and its transform; None if it is linear."""
    values = values_of(fn, dtype)
    finite = bool(np.isfinite(values[NEAR]).all())
    if finite and is_line(values, dtype):
        return "linear", None
    for name, (function, transform) in FUNCTIONS.items():
        if finite and _is_like(values, function(POINTS), dtype):
            return name, transform
    kinks = piecewise(values, dtype)
    if kinks is not None:
        return "piecewise linear", lambda m, v: expectations.piecewise_linear(m, v, *kinks)
    found = jumps(fn, POINTS[EVEN], dtype)
    if len(found):
        steps, rest = [(t, y - x) for t, x, y in found], values
        for t, before, after in found:  # the value at the point of a jump is of no account
            at = np.abs(POINTS - t) < 16 * float(jnp.finfo(dtype).eps) * (1 + abs(t))
            rest = np.where(at, np.where(t < POINTS, after, before), rest)
        rest = rest - sum(c * (t < POINTS) for t, c in steps)
        line: Any = [], [float(rest[ONE] - rest[ZERO])], float(rest[ZERO])
        pieces: Any = line if is_line(rest, dtype) else piecewise(rest, dtype)
        if pieces is None:
            raise refuse("a function that jumps", node.source, register(node))
        bends, slopes, value = pieces
        return "steps", lambda m, v: with_jumps(m, v, bends, slopes, value, steps)
    quadrature = expectations.elementwise if finite else _quadrature
    return "quadrature", functools.partial(quadrature, fn)


def _is_like(values: np.ndarray, expected: np.ndarray, dtype: jnp.dtype) -> bool:
    close = 32 * float(jnp.finfo(dtype).eps)
    return all(
        (np.abs(values[at] - y) <= close * (1 + float(np.abs(y).max()))).all()
        for at, y in ((at, expected[at]) for at in NEAR_OR_FAR)
    )


def is_line(values: np.ndarray, dtype: jnp.dtype) -> bool:
    """Whether a function with these values at `POINTS` is linear."""
    slope = (values[NEAR][-1] - values[0]) / 12
    return _is_like(values, values[ZERO] + slope * POINTS, dtype)


def _quadrature(fn: Callable[[Array], Array], mean: Array, variance: Array) -> ElementwiseMoments:
    """By quadrature; to first order where nodes leave the domain, as a logarithm's near zero do."""
    moments = expectations.elementwise(fn, mean, variance)
    slope = jax.grad(lambda x: jnp.sum(jnp.vectorize(fn)(x)))(mean)
    at_mean, none = jnp.vectorize(fn)(mean), jnp.zeros_like(mean)
    first = ElementwiseMoments(at_mean, slope**2 * variance, slope, none)
    known = jnp.isfinite(moments.mean) & jnp.isfinite(moments.variance)
    return jax.tree.map(lambda a, b: jnp.where(known, a, b), moments, first)


def piecewise(
    values: np.ndarray, dtype: jnp.dtype
) -> tuple[list[float], list[float], float] | None:
    """Kinks, slopes and value at the first kink of a continuous piecewise linear function, or None.

    Finds up to three kinks in [-32, 32] that are more than 0.75 apart.
    """
    x, y = POINTS[EVEN], values[EVEN]
    if not np.isfinite(y).all():
        return None
    slope = np.diff(y) / np.diff(x)
    close = 1e3 * float(jnp.finfo(dtype).eps) * (1 + np.abs(slope).max())
    lines: list[tuple[float, float]] = []  # slope, value at zero
    for i in np.flatnonzero(np.abs(np.diff(slope)) < close):
        if not lines or abs(slope[i] - lines[-1][0]) > close:
            lines.append((slope[i], y[i] - slope[i] * x[i]))
    if not 2 <= len(lines) <= 4:
        return None
    kinks = [(b - d) / (c - a) for (a, b), (c, d) in pairwise(lines)]
    kinks = [0.0 if abs(t) < close else float(t) for t in kinks]
    slopes = [0.0 if abs(a) < close else float(a) for a, _ in lines]
    value = float(slopes[0] * kinks[0] + lines[0][1])
    parts = [c * np.maximum(POINTS - t, 0) for c, t in zip(np.diff(slopes), kinks, strict=True)]
    expected = value + slopes[0] * (POINTS - kinks[0]) + sum(parts)
    close = close * (1 + np.abs(POINTS))
    fits = kinks == sorted(kinks) and (np.abs(values - expected) <= close).all()
    return (kinks, slopes, value) if fits else None
