"""Elementwise functions of one random array, recognised by their operations and values.

Where they bend and jump, pieces that are linear, and the feed-forward layer around them.
"""

import functools
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax import expectations
from moment_jax.expectations import ElementwiseMoments
from moment_jax.expectations.quadrature import resolving
from moment_jax.layers.params import DenseParams, FeedForwardParams
from moment_jax.layers.rules import rules_of
from moment_jax.propagation.arrays import Base, Moments, made, numbered
from moment_jax.propagation.dense import projection, read_dense
from moment_jax.propagation.errors import refuse, register
from moment_jax.propagation.graph import Node, independent
from moment_jax.propagation.normalization import log_probabilities
from moment_jax.propagation.propagator import Propagator, pattern
from moment_jax.propagation.regions import BENDING, GELU, RATIONAL, Univariate, univariate

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


Transform = Callable[[Array, Array], ElementwiseMoments]  # of mean and variance


@pattern
def _univariate(propagator: Propagator, node: Node) -> Moments | None:
    found = univariate(node)
    if found is None:
        return None
    # The logarithm of a probability is nearer to Gaussian than the probability.
    logs = log_probabilities(propagator, found.source) if "log" in found.operations else None
    of_log = found.after(jnp.exp, "exp")
    if logs is None or not np.isfinite(at(of_log.fn, np.linspace(-3, 3, 64), found)).all():
        x = propagator.moments(found.source).sequence()
    else:  # all but such as log(1 - p)
        found, x = of_log, logs.sequence()
    name, transform, assumes = recognised(found, node)

    def compute() -> tuple[Any, ...]:
        mean, cov = x.moments
        if isinstance(transform, Pieces):
            gain = jnp.full((1, mean.shape[1]), transform.slopes[0], mean.dtype)
            out, cov = mean * gain + jnp.asarray(transform.value, mean.dtype), cov.rescale(gain)
        else:
            moments = transform(mean, cov.variance())
            gain, out, cov = moments.gain, moments.mean, cov.elementwise(moments)
        return out, cov, lambda cross: cross.rescale(gain)

    propagator.note(node, name, assumes)
    return x.made(compute, node.shape)


def recognised(found: Univariate, node: Node) -> tuple[str, Transform | Pieces, str]:
    """The name of the function by which `node` is made, its transform, and what this assumes.

    The transform of a linear function is its only piece.
    """
    gaussian = "its input Gaussian"
    if found.operations <= GELU and not found.operations <= RATIONAL:
        x = np.concatenate([np.linspace(-6, 6, 49), np.geomspace(8, 1e4, 12)])
        x = at(lambda x: x, np.concatenate([-x, x]), found)
        expected = [t / 2 * math.erfc(-t / math.sqrt(2)) for t in x]
        if np.allclose(at(found.fn, x, found), expected, atol=min(32 * found.eps, 0.02)):
            return "gelu", expectations.gelu, gaussian
    places = breaks(found)
    if places is not None and found.operations <= RATIONAL | BENDING:
        pieces = pieces_of(found, places)
        if pieces is not None:
            if not pieces.bends and not pieces.steps:
                return "linear", pieces, ""
            if pieces == ([0.0], [0.0, 1.0], 0.0, []):
                return "relu", expectations.rectified, gaussian
            fn, name = (
                expectations.piecewise_linear,
                "steps" if pieces.steps else "piecewise linear",
            )
            return name, lambda m, v: fn(m, v, *pieces), gaussian
    if jumps_at(found, places):
        raise refuse("a function that jumps", node.source, register(node))
    bent = not found.operations.isdisjoint(BENDING)
    num_nodes, width = resolving(found.fn, found.source.dtype, bends=bent, eps=found.eps)
    if num_nodes is None:
        return "quadrature", functools.partial(_quadrature, found.fn), gaussian
    quadrature = functools.partial(
        expectations.elementwise, found.fn, num_nodes=num_nodes, bends=bent
    )
    if width < 2:
        gaussian += f", of sd up to {width:g}: beyond it the function is too narrow"
    return "quadrature", quadrature, gaussian


def _quadrature(fn: Callable[[Array], Array], mean: Array, variance: Array) -> ElementwiseMoments:
    """By quadrature; to first order where nodes leave the domain, as a logarithm's near zero do."""
    moments = expectations.elementwise(fn, mean, variance)
    slope = jax.grad(lambda x: jnp.sum(jnp.vectorize(fn)(x)))(mean)
    at_mean, none = jnp.vectorize(fn)(mean), jnp.zeros_like(mean)
    first = ElementwiseMoments(at_mean, slope**2 * variance, slope, none)
    known = jnp.isfinite(moments.mean) & jnp.isfinite(moments.variance)
    return jax.tree.map(lambda a, b: jnp.where(known, a, b), moments, first)


@pattern
def _feed_forward(propagator: Propagator, node: Node) -> Moments | None:
    """A dense layer, a function, and a dense layer back to as many features, in `Separable`."""
    rule = rules_of(propagator.structure).feed_forward
    if node.op != "dot_general" or rule is None:
        return None
    for value in node.nodes:
        found = univariate(value)
        hidden = None if found is None else projection(propagator, found.source)
        if found is None or hidden is None or hidden.rotation is not None:
            continue
        x, (d, width) = hidden.x, hidden.layer.kernel.shape
        if len(x.order) == 1:  # no tokens that share noise: layer by layer is nearer
            continue
        shape = len(x.order), width
        layout = Moments(Base(shape, _unknown), np.asarray(hidden.places))
        output = read_dense(propagator, node, layout)
        apart = independent(*node.operands) and independent(*hidden.product.operands)
        if output is None or not output.x.same(layout.base.at(numbered(shape))) or not apart:
            continue
        if output.layer.kernel.shape[1] != d or width < d:
            continue
        name, transform, _ = recognised(found, value)
        if isinstance(transform, Pieces):
            continue
        params = FeedForwardParams(hidden.layer, DenseParams(output.layer.kernel))
        compute = functools.partial(_computed, rule, x, params, transform)
        propagator.note(node, f"feed_forward ({name})", "input and kernels independent")
        return made(compute, x.shape, output.places, x)
    return None


def _computed(rule: Any, x: Any, params: Any, transform: Any) -> Any:
    return rule(x.mean, x.cov, params, transform)


def _unknown() -> Any:
    raise AssertionError("a layout has no numbers")
