"""Products, quotients, maxima and comparisons of two random arrays, with the covariance of both."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax import expectations
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.expectations import ElementwiseMoments
from moment_jax.expectations.activations import with_jumps
from moment_jax.propagation.crosses import covariance
from moment_jax.propagation.errors import refuse, register
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Axes, Moments, Sequence, as_rows, fresh
from moment_jax.propagation.propagator import Propagator, rule

MOST = 64  # entries of which a maximum is taken


class _Pair(NamedTuple):
    """Two jointly Gaussian arrays as sequences."""

    a: Sequence
    b: Sequence
    cross: Any  # Cov[a, b]
    axes: tuple[Axes, Axes]
    shape: tuple[int, ...]

    def weighted(self, p: Any, q: Any) -> Any:
        """The covariance of p a + q b, p and q (T, D)."""
        cross = self.cross
        if cross is not None:
            cross = cross.rescale(q).T.rescale(p).T
        return self.a.cov.rescale(p).add_branch(self.b.cov.rescale(q), cross)

    def result(self, mean: Array, cov: Any, p: Array, q: Array) -> Moments:
        """An array that is p a + q b to first order."""
        parents = (self.a, lambda c: c.rescale(p)), (self.b, lambda c: c.rescale(q))
        return fresh(mean, cov, self.shape, *self.axes, parents)


def _pair(propagator: Propagator, node: Node, shape: Any, *operands: Moments) -> _Pair:
    m, other = (x.broadcast(shape) for x in operands)
    axes = max(m, other, key=lambda x: x.mean.size).natural()
    a, b = m.sequence(*axes), other.sequence(*axes)
    return _Pair(a, b, covariance(propagator, node, a, b), axes, tuple(shape))


def _operands(propagator: Propagator, node: Node) -> _Pair:
    """Those of an operation on two arrays."""
    return _pair(propagator, node, node.shape, *map(propagator.moments, node.operands))


@rule("mul", "div")
def _product(propagator: Propagator, node: Node) -> Moments | None:
    """Moments to second order in the noise; a quotient is a product with the reciprocal's moments."""
    if not all(map(is_random, node.operands)):
        return None
    pair = _operands(propagator, node)
    a, b, cross, *_ = pair
    other, other_cov, slope = b.mean, b.cov, jnp.ones_like(b.mean)
    if node.op == "div":
        moments = _reciprocal(b.mean, b.cov.variance())
        other, other_cov, slope = moments.mean, b.cov.elementwise(moments), moments.gain
        cross = None if cross is None else cross.rescale(slope)
    mean = a.mean * other if cross is None else a.mean * other + cross.own()
    cov = pair._replace(b=dataclasses.replace(b, cov=other_cov), cross=cross).weighted(
        other, a.mean
    )
    cov = cov.add(a.cov.hadamard(other_cov, cross))
    assumed = "factors independent" if cross is None else "factors jointly Gaussian"
    if node.op == "div":
        assumed += ", the divisor of one sign"
    propagator.note(node, "product" if node.op == "mul" else "quotient", assumed)
    return pair.result(mean, cov, other, a.mean * slope)


def _reciprocal(mean: Array, variance: Array) -> ElementwiseMoments:
    """Moments of 1 / x for an x that keeps its sign, log-normal: those of a Gaussian are infinite.

    NaN where x is within two sd of zero, and may change its sign.
    """
    inverse = 1 / mean
    relative = variance * inverse**2
    out = jnp.where(relative < 0.25, inverse * (1 + relative), jnp.nan)
    rest = safe_sqrt(relative * (out**2 - inverse**2))
    return ElementwiseMoments(out, relative * out**2, -(inverse**2), rest)


@rule("max", "min")
def _larger(propagator: Propagator, node: Node) -> Moments | None:
    propagator.note(node, "maximum" if node.op == "max" else "minimum", "operands jointly Gaussian")
    return _extreme(_operands(propagator, node), 1 if node.op == "max" else -1)


def _extreme(pair: _Pair, sign: int) -> Moments:
    """B + relu(a - b), or b - relu(b - a), by the moments of the difference (Clark)."""
    one = jnp.ones_like(pair.a.mean)
    difference = pair.weighted(one, -one)
    moments = expectations.rectified(sign * (pair.a.mean - pair.b.mean), difference.variance())
    gain = moments.gain
    left = moments.variance - gain**2 * difference.variance()
    rest = moments._replace(variance=left, gain=jnp.zeros_like(gain))
    cov = pair.weighted(gain, 1 - gain).add(difference.elementwise(rest))
    return pair.result(pair.b.mean + sign * moments.mean, cov, gain, 1 - gain)


@rule("reduce_max", "reduce_min")
def _largest(propagator: Propagator, node: Node) -> Moments | None:
    """A tournament of maxima of two."""
    m, axes = propagator.moments(node.operands[0]), node.params["axes"]
    left = [i for i in range(m.ndim) if i not in axes]
    entrants = [
        Moments(m.base, places)
        for places in m.places.transpose(*axes, *left).reshape(-1, *node.shape)
    ]
    if len(entrants) > MOST:
        raise refuse(f"`{node.op}` of more than {MOST} entries", node.source, register(node))
    while len(entrants) > 1:
        pairs = zip(entrants[::2], entrants[1::2], strict=False)
        winners = [_pair(propagator, node, node.shape, *pair) for pair in pairs]
        last = entrants[-1:] if len(entrants) % 2 else []
        entrants = [_extreme(x, 1 if node.op == "reduce_max" else -1) for x in winners] + last
        for x in entrants:
            x.base.node = x.base.node or node
    propagator.note(node, node.op.replace("reduce_", ""), "entries jointly Gaussian")
    return entrants[0]


@rule("gt", "ge", "lt", "le")
def _compared(propagator: Propagator, node: Node) -> Moments | None:
    """One where the difference is positive, zero elsewhere; of what is jointly Gaussian."""
    pair, sign = _operands(propagator, node), 1 if node.op in ("gt", "ge") else -1
    if pair.cross is not None and pair.a.base is not pair.b.base:
        return None  # such as an array and its maximum
    one = jnp.ones_like(pair.a.mean)
    difference = pair.weighted(one, -one)
    at = sign * (pair.a.mean - pair.b.mean)
    moments = with_jumps(at, difference.variance(), [], [0.0], 0.0, [(0.0, 1.0)])
    propagator.note(node, "comparison", "operands jointly Gaussian")
    gain = sign * moments.gain
    return pair.result(moments.mean, difference.elementwise(moments), gain, -gain)


@rule("select_n")
def _chosen(propagator: Propagator, node: Node) -> Moments | None:
    """By a certain condition that is not known while tracing."""
    condition, *cases = node.operands
    if is_random(condition) or len(cases) != 2 or np.shape(condition) != tuple(node.shape):
        return None
    pair = _pair(propagator, node, node.shape, *map(propagator.moments, cases[::-1]))
    chosen = as_rows(condition, *pair.axes)
    p = chosen.astype(pair.a.mean.dtype)
    propagator.note(node, "select_n", "operands jointly Gaussian")
    return pair.result(
        jnp.where(chosen, pair.a.mean, pair.b.mean), pair.weighted(p, 1 - p), p, 1 - p
    )
