"""Elementwise functions of one random array, however they are written, and products of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax import expectations
from moment_jax.expectations import ElementwiseMoments
from moment_jax.propagation.branches import through_gain
from moment_jax.propagation.dense import branches_of
from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import Moments, fresh
from moment_jax.propagation.propagator import Propagator, pattern
from moment_jax.propagation.regions import univariate

Array = jax.Array


@pattern
def _univariate(propagator: Propagator, node: Node) -> Moments | None:
    found = univariate(node)
    if found is None:
        return None
    source, fn = found
    m = propagator.moments(source)
    tokens, features = m.natural()
    mean, cov = m.sequence(tokens, features)
    name = recognised(fn, mean.dtype)
    kinks = piecewise(fn, mean.dtype) if name == "quadrature" else None
    before = branches_of(m, mean, tokens, features)
    if name == "linear":
        with jax.ensure_compile_time_eval():
            shift = fn(jnp.zeros((), mean.dtype))
            slope = jnp.full((1, mean.shape[1]), fn(jnp.ones((), mean.dtype)) - shift, mean.dtype)
        out, out_cov = mean * slope + shift, cov.rescale(slope)
        branches = through_gain(before, slope, cov, out_cov, mean)
    else:
        if kinks is None:
            moments = _moments(name, fn, mean, cov.variance())
        else:
            moments = expectations.piecewise_linear(mean, cov.variance(), *kinks)
            name = "piecewise linear"
        out, out_cov = moments.mean, cov.elementwise(moments)
        branches = through_gain(before, moments.gain, cov, out_cov, mean)
    slopes = slope if name == "linear" else moments.gain
    shown = fresh(jnp.broadcast_to(slopes, mean.shape), out_cov, node.shape, tokens, features)
    own = Moments(out, out_cov, shown.places)
    node.line = source, propagator.moments(source).array(), shown.array(), own.array()
    propagator.note(node, name, "" if name == "linear" else "its input Gaussian")
    return dataclasses.replace(fresh(out, out_cov, node.shape, tokens, features), branches=branches)


def _moments(
    name: str, fn: Callable[[Array], Array], mean: Array, variance: Array
) -> ElementwiseMoments:
    if name == "relu":
        return expectations.rectified(mean, variance)
    if name == "gelu":
        return expectations.gelu(mean, variance)
    moments = expectations.elementwise(fn, mean, variance)
    if _everywhere_finite(fn, mean.dtype):
        return moments
    # A logarithm or a root whose argument is near zero for some nodes of the quadrature: to first order.
    slope = jax.grad(lambda x: jnp.sum(jnp.vectorize(fn)(x)))(mean)
    first = ElementwiseMoments(
        jnp.vectorize(fn)(mean), slope**2 * variance, slope, jnp.zeros_like(mean)
    )
    finite = jnp.isfinite(moments.mean) & jnp.isfinite(moments.variance)
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), moments, first)


def _everywhere_finite(fn: Callable[[Array], Array], dtype: jnp.dtype) -> bool:
    return bool(np.isfinite(_values(fn, dtype, np.linspace(-6, 6, 49))).all())


def _values(fn: Callable[[Array], Array], dtype: jnp.dtype, x: np.ndarray) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.vmap(fn)(jnp.asarray(x, dtype)), float)


NEAR = np.linspace(-6, 6, 49)
FAR = np.concatenate([-np.geomspace(8, 1e4, 12)[::-1], np.geomspace(8, 1e4, 12)])


def recognised(fn: Callable[[Array], Array], dtype: jnp.dtype) -> str:
    """What a function of numbers is, by its values: linear, relu, gelu or another."""
    near, far = (_values(fn, dtype, x) for x in (NEAR, FAR))
    if not np.isfinite(near).all():
        return "quadrature"
    candidates: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "linear": lambda x: near[24] + (near[-1] - near[0]) / 12 * x,
        "relu": lambda x: np.maximum(x, 0),
        "gelu": lambda x: np.asarray(jax.nn.gelu(x, approximate=False), float),
    }
    for name, candidate in candidates.items():
        with jax.ensure_compile_time_eval():
            expected = [candidate(x) for x in (NEAR, FAR)]
        if all(_same(a, b, dtype) for a, b in zip((near, far), expected, strict=True)):
            return name
    return "quadrature"


def _same(values: np.ndarray, expected: np.ndarray, dtype: jnp.dtype) -> bool:
    close = 32 * float(jnp.finfo(dtype).eps) * (1 + float(np.abs(expected).max()))
    return bool((np.abs(values - expected) <= close).all())


def piecewise(
    fn: Callable[[Array], Array], dtype: jnp.dtype
) -> tuple[list[float], list[float], float] | None:
    """Kinks, slopes and the value at the first kink of a continuous piecewise linear function, or None.

    Kinks within 32 of zero are found, if they are further apart than three quarters.
    """
    x = np.linspace(-32, 32, 257) + 1 / 16
    y = _values(fn, dtype, x)
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
    steps = np.diff(slopes)
    for points in (NEAR, FAR, x):
        parts = [c * np.maximum(points - t, 0) for c, t in zip(steps, kinks, strict=True)]
        expected = value + slopes[0] * (points - kinks[0]) + sum(parts)
        found = _values(fn, dtype, points)
        if (np.abs(found - expected) > close * (1 + np.abs(points))).any():
            return None
    return kinks, slopes, value
