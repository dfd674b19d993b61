"""Elementwise functions of one random array, recognised by their values."""

import math
from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax import expectations
from moment_jax.expectations import ElementwiseMoments
from moment_jax.propagation.branches import through_gain
from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import Moments, taken
from moment_jax.propagation.propagator import Propagator, pattern
from moment_jax.propagation.regions import univariate


@pattern
def _univariate(propagator: Propagator, node: Node) -> Moments | None:
    found = univariate(node)
    if found is None:
        return None
    source, fn = found
    m = propagator.moments(source)
    x = m.sequence()
    mean, cov = x.mean, x.cov
    with jax.ensure_compile_time_eval():
        values = np.asarray(jax.vmap(fn)(jnp.asarray(POINTS, mean.dtype)), float)
    name = recognised(values, mean.dtype)
    kinks = piecewise(values, mean.dtype) if name == "quadrature" else None
    if name == "linear":
        gain = jnp.full((1, mean.shape[1]), values[ONE] - values[ZERO], mean.dtype)
        out, out_cov = mean * gain + jnp.asarray(values[ZERO], mean.dtype), cov.rescale(gain)
    else:
        if kinks is not None:
            name = "piecewise linear"
            moments = expectations.piecewise_linear(mean, cov.variance(), *kinks)
        else:
            finite = bool(np.isfinite(values[NEAR]).all())
            moments = _moments(name, fn, mean, cov.variance(), finite=finite)
        gain, out, out_cov = moments.gain, moments.mean, cov.elementwise(moments)
    own = x.changed(out, out_cov, node.shape, through_gain(x, gain, out_cov))
    gains = taken(jnp.broadcast_to(gain, mean.shape), own.places)
    node.line = source, m.array(), gains, own.array()
    propagator.note(node, name, "" if name == "linear" else "its input Gaussian")
    return own


def _moments(
    name: str, fn: Callable[[Array], Array], mean: Array, variance: Array, *, finite: bool
) -> ElementwiseMoments:
    if name == "relu":
        return expectations.rectified(mean, variance)
    if name == "gelu":
        return expectations.gelu(mean, variance)
    moments = expectations.elementwise(fn, mean, variance)
    if finite:
        return moments
    # First order where quadrature nodes leave the domain, as those of a logarithm near zero do.
    slope = jax.grad(lambda x: jnp.sum(jnp.vectorize(fn)(x)))(mean)
    first = ElementwiseMoments(
        jnp.vectorize(fn)(mean), slope**2 * variance, slope, jnp.zeros_like(mean)
    )
    known = jnp.isfinite(moments.mean) & jnp.isfinite(moments.variance)
    return jax.tree.map(lambda a, b: jnp.where(known, a, b), moments, first)


# A function is recognised by its values at these points, evaluated in one go.
POINTS = np.concatenate(
    [
        np.linspace(-6, 6, 49),
        -np.geomspace(8, 1e4, 12)[::-1],
        np.geomspace(8, 1e4, 12),
        np.linspace(-32, 32, 257) + 1 / 16,
    ]
)
NEAR, FAR, EVEN = slice(0, 49), slice(49, 73), slice(73, None)
ZERO, ONE = 24, 28
FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2)),
}


def recognised(values: np.ndarray, dtype: jnp.dtype) -> str:
    """The name of a function by its values: linear, relu, gelu, or quadrature for any other."""
    near = values[NEAR]
    if not np.isfinite(near).all():
        return "quadrature"
    line = near[ZERO] + (near[-1] - near[0]) / 12 * POINTS
    candidates = {"linear": line, **{name: fn(POINTS) for name, fn in FUNCTIONS.items()}}
    for name, expected in candidates.items():
        if all(_same(values[at], expected[at], dtype) for at in (NEAR, FAR)):
            return name
    return "quadrature"


def _same(values: np.ndarray, expected: np.ndarray, dtype: jnp.dtype) -> bool:
    close = 32 * float(jnp.finfo(dtype).eps) * (1 + float(np.abs(expected).max()))
    return bool((np.abs(values - expected) <= close).all())


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
    same = np.abs(np.diff(slope)) < close
    lines: list[tuple[float, float]] = []  # slope, value at zero
    for i in np.flatnonzero(same):
        line = slope[i], y[i] - slope[i] * x[i]
        if not lines or abs(line[0] - lines[-1][0]) > close:
            lines.append(line)
    if not 2 <= len(lines) <= 4:
        return None
    kinks = [(b - d) / (c - a) for (a, b), (c, d) in pairwise(lines)]
    kinks = [0.0 if abs(t) < close else float(t) for t in kinks]
    slopes = [0.0 if abs(a) < close else float(a) for a, _ in lines]
    if kinks != sorted(kinks):
        return None
    value = float(slopes[0] * kinks[0] + lines[0][1])
    parts = [c * np.maximum(POINTS - t, 0) for c, t in zip(np.diff(slopes), kinks, strict=True)]
    expected = value + slopes[0] * (POINTS - kinks[0]) + sum(parts)
    if (np.abs(values - expected) > close * (1 + np.abs(POINTS))).any():
        return None
    return kinks, slopes, value
