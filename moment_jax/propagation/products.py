"""Products and quotients of two random arrays, with the covariance of both."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.expectations import ElementwiseMoments
from moment_jax.propagation.crosses import covariance
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Axes, Moments, Sequence, as_rows, fresh
from moment_jax.propagation.propagator import Propagator, rule


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
