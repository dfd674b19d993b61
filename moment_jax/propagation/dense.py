"""Products with weights: dense layers with any arrangement of axes, biases and gains."""

from typing import NamedTuple

import numpy as np
from jax import Array

from moment_jax.layers.dense import dense
from moment_jax.layers.params import DenseParams
from moment_jax.posterior import Point, Posterior
from moment_jax.propagation.branches import through_dense, through_gain
from moment_jax.propagation.errors import refuse
from moment_jax.propagation.graph import Node, as_weight
from moment_jax.propagation.moments import Moments, Sequence, as_rows, taken
from moment_jax.propagation.primitives import factors, in_product
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.weights import Weight


class Dense(NamedTuple):
    """A sequence times a weight."""

    x: Sequence
    kernel: Posterior  # (in, out)
    places: np.ndarray  # of the result's entries, in (T, out)


def read_dense(propagator: Propagator, node: Node) -> Dense | None:
    """A `dot_general` as a dense layer, or None if it is another product."""
    for side in (0, 1):
        value, weight = node.operands[side], as_weight(node.operands[1 - side])
        if weight is None or isinstance(value, Weight):
            continue
        own, other = factors(node)[side], factors(node)[1 - side]
        if any(np.shape(value)[i] > 1 for i in own.batch):
            return None
        certain = not isinstance(value, Node)
        x = propagator.certain(value, own.contracted) if certain else propagator.moments(value)
        if not certain and set(x.token_axes()) & set(own.contracted):
            return None  # over tokens
        kernel = weight.kernel(other.contracted, other.free)
        if kernel is None:
            return None
        places = in_product(node, side, np.arange(node.size))
        return Dense(x.sequence((*own.batch, *own.free), own.contracted), kernel, places)
    return None


@rule("dot_general")
def _dense(propagator: Propagator, node: Node) -> Moments | None:
    found = read_dense(propagator, node)
    if found is None:
        return None
    x, kernel = found.x, found.kernel
    mean, cov = dense(x.mean, x.cov, DenseParams(kernel))
    branches = through_dense(x, kernel.mean)
    propagator.note(node, "dense", "input and kernel independent")
    return Moments(mean, cov, found.places, branches)


class _Pair(NamedTuple):
    """A random array, and a weight or a certain array that is added to it or multiplies it."""

    side: int  # of the random array
    x: Sequence
    weight: Weight  # the other, with the same shape
    vector: Posterior | None  # the belief about it if it is the same for every token
    mean: Array  # (1, D) then, else (T, D)

    @property
    def random(self) -> bool:
        return not isinstance(self.weight.posterior, Point)


def _pair(propagator: Propagator, node: Node) -> _Pair | None:
    side = int(isinstance(node.operands[1], Node))
    weight = as_weight(node.operands[1 - side])
    if weight is None:
        return None
    if node.op == "div":
        if side == 1 or not isinstance(weight.posterior, Point):
            return None
        weight = Weight.of(Point(1 / weight.posterior.mean))
    weight = weight.broadcast(node.shape)
    x = propagator.moments(node.operands[side]).broadcast(node.shape).sequence()
    vector = weight.vector(x.features)
    if vector is not None:
        return _Pair(side, x, weight, vector, vector.mean.reshape(1, -1))
    mean = as_rows(taken(weight.posterior.mean, weight.places), *x.axes)
    return _Pair(side, x, weight, None, mean)


@rule("add", "add_any", "sub")
def _shifted(propagator: Propagator, node: Node) -> Moments | None:
    """Plus or minus a weight or a certain array."""
    pair = _pair(propagator, node)
    if pair is None:
        return None
    x, cov = pair.x, pair.x.cov
    if pair.random and pair.vector is not None:
        cov = cov.add(type(cov).shared(cov.shape[0], pair.vector.vector_cov()))
    elif pair.random:
        cov = cov.add(propagator.moments(pair.weight).sequence(*x.axes).cov)
    if node.op == "sub" and pair.side == 1:
        return x.changed(pair.mean - x.mean, cov, node.shape)
    mean = x.mean - pair.mean if node.op == "sub" else x.mean + pair.mean
    propagator.note(node, "bias" if pair.random else "shift", "independent" if pair.random else "")
    return x.changed(mean, cov, node.shape, x.branches)


@rule("mul", "div")
def _gain(propagator: Propagator, node: Node) -> Moments | None:
    """Times a weight, or times or divided by a certain array."""
    pair = _pair(propagator, node)
    if pair is None:
        return None
    x = pair.x
    cov = x.cov.rescale(pair.mean)
    branches = through_gain(x, pair.mean, cov)
    if pair.random and pair.vector is None:
        raise refuse(
            f"a product with random weights {pair.weight.shape} that are not one gain per feature",
            node.source,
            "Use one gain per feature, or a certain array.",
        )
    if pair.random:
        cov = cov.add(x.cov.gain_noise(x.mean, pair.vector.vector_cov()))
    propagator.note(node, "gain", "input and gain independent" if pair.random else "")
    return x.changed(x.mean * pair.mean, cov, node.shape, branches)
