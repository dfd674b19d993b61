"""Maxima, minima and comparisons of random arrays, by the moments of their difference (Clark)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Full
from moment_jax.expectations import ElementwiseMoments, rectified
from moment_jax.expectations.rectified import with_jumps
from moment_jax.propagation.errors import refuse, register
from moment_jax.propagation.graph import Node, independent, is_random
from moment_jax.propagation.moments import Axes, Moments, as_rows, entries, fresh
from moment_jax.propagation.propagator import Propagator, rule

LARGEST = 2**12  # entries whose dense covariance is formed


class _Pair(NamedTuple):
    """Two jointly Gaussian arrays x and y as sequences."""

    axes: tuple[Axes, Axes]
    x: Array  # means, (T, D)
    y: Array
    difference: Any  # covariance of x - y
    mixed: Callable[[Array], Any]  # p (T, D) -> covariance of p x + (1 - p) y


def _pair(propagator: Propagator, shape: Any, operands: Any) -> _Pair | None:
    """Two arrays that are independent, or entries of one array."""
    a, b = (propagator.moments(x).broadcast(shape) for x in operands)
    axes = max(a, b, key=lambda m: m.mean.size).natural()
    left, right = a.sequence(*axes), b.sequence(*axes)
    if independent(*operands):
        x, y = left.cov, right.cov

        def apart(p: Array) -> Any:
            return x.rescale(p).add(y.rescale(1 - p))

        return _Pair(axes, left.mean, right.mean, x.add(y), apart)
    if a.cov is not b.cov or a.cov.shape[0] * a.cov.shape[1] > LARGEST:
        return None
    rows = np.stack([as_rows(m.places, *axes) for m in (a, b)])
    cov = jnp.moveaxis(entries(a.cov, rows), 3, 1)  # (2, 2, T, D, T, D)

    def together(p: Array, q: Array) -> Any:
        """The covariance of p x + q y."""
        parts = jnp.stack([p, q])
        return propagator.structure.project(jnp.einsum("itd,jse,ijtdse->tdse", parts, parts, cov))

    one = jnp.ones_like(left.mean)
    return _Pair(axes, left.mean, right.mean, together(one, -one), lambda p: together(p, 1 - p))


@rule("max", "min")
def _larger(propagator: Propagator, node: Node) -> Moments | None:
    """Y + relu(x - y), or y - relu(y - x)."""
    pair = _pair(propagator, node.shape, node.operands)
    if pair is None:
        return None
    sign = 1 if node.op == "max" else -1
    variance = pair.difference.variance()
    moments = rectified(sign * (pair.x - pair.y), variance)
    gain = moments.gain
    left = moments.variance - gain**2 * variance
    rest = moments._replace(variance=left, gain=jnp.zeros_like(gain))
    cov = pair.mixed(gain).add(pair.difference.elementwise(rest))
    propagator.note(node, "maximum" if sign > 0 else "minimum", "operands jointly Gaussian")
    return fresh(pair.y + sign * moments.mean, cov, node.shape, *pair.axes)


@rule("gt", "ge", "lt", "le")
def _compared(propagator: Propagator, node: Node) -> Moments | None:
    """One where the difference is positive, zero elsewhere."""
    pair = _pair(propagator, node.shape, node.operands)
    if pair is None:
        return None
    sign = 1 if node.op in ("gt", "ge") else -1
    difference, variance = sign * (pair.x - pair.y), pair.difference.variance()
    moments = with_jumps(difference, variance, [], [0.0], 0.0, [(0.0, 1.0)])
    propagator.note(node, "comparison", "operands jointly Gaussian")
    return fresh(moments.mean, pair.difference.elementwise(moments), node.shape, *pair.axes)


@rule("select_n")
def _chosen(propagator: Propagator, node: Node) -> Moments | None:
    """By a certain condition that is not known while tracing."""
    condition, *cases = node.operands
    if is_random(condition) or len(cases) != 2 or np.shape(condition) != tuple(node.shape):
        return None
    pair = _pair(propagator, node.shape, cases[::-1])
    if pair is None:
        return None
    chosen = as_rows(condition, *pair.axes)
    propagator.note(node, "select_n", "operands jointly Gaussian")
    mean, cov = jnp.where(chosen, pair.x, pair.y), pair.mixed(chosen.astype(pair.x.dtype))
    return fresh(mean, cov, node.shape, *pair.axes)


@rule("reduce_max", "reduce_min")
def _largest(propagator: Propagator, node: Node) -> Moments | None:
    """A tournament of maxima of two, with all covariances."""
    m, axes = propagator.moments(node.operands[0]), node.params["axes"]
    left = tuple(i for i in range(m.ndim) if i not in axes)
    places = as_rows(m.places, axes, left)
    if places.size > LARGEST or np.prod(m.cov.shape) > LARGEST:
        raise refuse(
            f"`{node.op}` of more than {LARGEST} random entries", node.source, register(node)
        )
    sign = 1 if node.op == "reduce_max" else -1
    mean, cov = sign * m.array().transpose(*axes, *left).ravel(), entries(m.cov, places.ravel())
    count = len(places)
    while count > 1:  # a last one without an opponent meets itself
        index = np.arange(len(mean)).reshape(count, -1)
        half = (count + 1) // 2
        others = np.concatenate([index[half:], index[half - 1 : half]])[:half]
        mean, cov = _winners(mean, cov, index[:half].ravel(), others.ravel())
        count = half
    tokens, features = (tuple(left.index(i) for i in g if i in left) for g in m.natural())
    rows = as_rows(np.arange(node.size).reshape(node.shape), tokens, features)
    cov = entries(Full.unchecked(cov[:, None, :, None]), rows)
    propagator.note(node, "maximum" if sign > 0 else "minimum", "entries jointly Gaussian")
    whole = propagator.structure.project(cov)
    return fresh(sign * mean[rows], whole, node.shape, tokens, features)


def _winners(mean: Array, cov: Array, x: np.ndarray, y: np.ndarray) -> tuple[Array, Array]:
    """Moments of the maxima of these pairs of entries of a Gaussian vector."""
    rows = cov[x] - cov[y]
    between = rows[:, x] - rows[:, y]
    moments: ElementwiseMoments = rectified(mean[x] - mean[y], jnp.diagonal(between))
    p = moments.gain[:, None]
    mixed = p * cov[x] + (1 - p) * cov[y]
    linear = p.T * mixed[:, x] + (1 - p.T) * mixed[:, y]
    left = moments.variance - moments.gain**2 * jnp.diagonal(between)
    rest = moments._replace(variance=left, gain=0 * moments.gain)
    columns = ElementwiseMoments(*(a[:, None] for a in rest))
    bent = Full.unchecked(between[:, None, :, None]).elementwise(columns)
    return mean[y] + moments.mean, linear + bent.cov[:, 0, :, 0]
