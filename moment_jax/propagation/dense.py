"""Products with weights: dense layers with any arrangement of axes, biases and gains."""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from moment_jax.layers.dense import dense
from moment_jax.layers.params import DenseParams
from moment_jax.posterior import Point, Posterior
from moment_jax.propagation.branches import Branch, through_dense, through_gain
from moment_jax.propagation.errors import refuse
from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import Axes, Moments, as_rows, fresh, taken
from moment_jax.propagation.propagator import Propagator, as_weight, rule
from moment_jax.propagation.weights import Weight


class Dense(NamedTuple):
    """A random sequence times a weight."""

    x: Moments
    tokens: Axes  # axes of x
    features: Axes
    kernel: Posterior  # (in, out)
    places: np.ndarray  # of the result's entries, in (T, out)


def read_dense(propagator: Propagator, node: Node) -> Dense | None:
    """A `dot_general` as a dense layer, or None if it is another product."""
    (contract, batch) = node.params["dimension_numbers"]
    for side in (0, 1):
        value, other = node.operands[side], node.operands[1 - side]
        weight = as_weight(other)
        if weight is None or isinstance(value, Weight):
            continue
        if any(np.shape(value)[i] > 1 for i in batch[side]):
            return None
        free = _free(np.ndim(value), contract[side], batch[side])
        outputs = _free(weight.ndim, contract[1 - side], batch[1 - side])
        inputs, features = tuple(contract[1 - side]), tuple(contract[side])
        if isinstance(value, Node):
            x = propagator.moments(value)
            if set(x.axes()[0]) & set(features):
                return None  # over tokens
            free = (*batch[side], *free)
        else:
            x = propagator.certain(value, features)
        kernel = weight.kernel(inputs, outputs)
        if kernel is None:
            return None
        shape = [np.shape(value)[i] for i in free], [weight.shape[i] for i in outputs]
        return Dense(x, free, features, kernel, product_places(*shape, side, node.shape))
    return None


def product_places(rows: list[int], columns: list[int], side: int, shape: Any) -> np.ndarray:
    """Places of a product's entries in (T, out); the sequence is the factor on `side`."""
    places = np.arange(math.prod([*rows, *columns])).reshape(*rows, *columns)
    if side == 1:
        places = np.moveaxis(places, range(len(rows)), range(-len(rows), 0))
    return places.reshape(shape)


def _free(ndim: int, contract: Any, batch: Any) -> Axes:
    return tuple(i for i in range(ndim) if i not in contract and i not in batch)


def branches_of(m: Moments, mean: Array, tokens: Axes, features: Axes) -> tuple[Branch, ...]:
    """The branches of `m` as this sequence: all, restricted to its features, or none."""
    if not m.branches or mean is m.mean:
        return m.branches
    token, feature = np.divmod(as_rows(m.places, tokens, features), m.mean.shape[1])
    if len(token) != len(m.mean) or (token != np.arange(len(token))[:, None]).any():
        return ()
    if (feature != feature[:1]).any():
        return ()
    return tuple(
        dataclasses.replace(branch, paths=tuple(p.columns(feature[0]) for p in branch.paths))
        for branch in m.branches
        if branch.paths
    )


@rule("dot_general")
def _dense(propagator: Propagator, node: Node) -> Moments | None:
    found = read_dense(propagator, node)
    if found is None:
        return None
    mean, cov = found.x.sequence(found.tokens, found.features)
    out_mean, out_cov = dense(mean, cov, DenseParams(found.kernel))
    before = branches_of(found.x, mean, found.tokens, found.features)
    branches = through_dense(before, mean, cov, found.kernel.mean)
    propagator.note(node, "dense", "input and kernel independent")
    return Moments(out_mean, out_cov, found.places, branches)


@rule("add", "add_any", "sub")
def _shifted(propagator: Propagator, node: Node) -> Moments | None:
    """Plus or minus a weight or a certain array."""
    for side in (0, 1):
        weight = as_weight(node.operands[1 - side])
        if weight is None:
            continue
        if isinstance(node.operands[side], Weight):  # two independent weights
            return None
        m = spread(propagator.moments(node.operands[side]), node.shape)
        tokens, features = m.natural()
        mean, cov = m.sequence(tokens, features)
        shift, parts = _noise(propagator, weight, node, m, tokens, features)
        cov = cov.add(*parts) if parts else cov
        if node.op == "sub" and side == 1:
            return fresh(shift - mean, cov, node.shape, tokens, features)
        total = mean - shift if node.op == "sub" else mean + shift
        propagator.note(node, "bias" if parts else "shift", "independent" if parts else "")
        branches = branches_of(m, mean, tokens, features)
        return fresh(total, cov, node.shape, tokens, features, branches)
    return None


def spread(m: Moments, shape: tuple[int, ...]) -> Moments:
    """The moments broadcast to a shape."""
    if m.shape == tuple(shape):
        return m
    return Moments(m.mean, m.cov, np.broadcast_to(m.places, shape), m.branches)


def _noise(
    propagator: Propagator, weight: Weight, node: Node, m: Moments, tokens: Axes, features: Axes
) -> tuple[Array, list[Any]]:
    """Mean of a weight broadcast to the node, as a sequence, and its covariance if it has one."""
    whole = _broadcast(weight, node.shape)
    t = math.prod(node.shape[i] for i in tokens)
    vector = whole.vector(features)
    if vector is not None:
        shift = vector.mean.reshape(1, -1)
        if isinstance(vector, Point):
            return shift, []
        return shift, [type(m.cov).shared(t, vector.vector_cov())]
    if isinstance(weight.posterior, Point):
        return as_rows(taken(weight.posterior.mean, whole.places), tokens, features), []
    mean, cov = whole.moments(propagator.structure).sequence(tokens, features)
    return mean, [cov]


@rule("mul", "div")
def _gain(propagator: Propagator, node: Node) -> Moments | None:
    """Times a weight, or times or divided by a certain array."""
    for side in (0, 1):
        weight = as_weight(node.operands[1 - side])
        if weight is None or isinstance(node.operands[side], Weight):
            continue
        if node.op == "div" and (side == 1 or not isinstance(weight.posterior, Point)):
            return None
        if node.op == "div":
            weight = Weight.of(Point(1 / weight.posterior.mean))
        m = spread(propagator.moments(node.operands[side]), node.shape)
        tokens, features = m.natural()
        mean, cov = m.sequence(tokens, features)
        shift, noise = _noise(propagator, weight, node, m, tokens, features)
        scaled = cov.rescale(shift)
        branches = through_gain(branches_of(m, mean, tokens, features), shift, cov, scaled, mean)
        if noise:
            vector = _broadcast(weight, node.shape).vector(features)
            if vector is None:
                raise refuse(
                    f"a product with random weights {weight.shape} that are not one gain per feature",
                    node.source,
                    "Use one gain per feature, or a certain array.",
                )
            scaled = scaled.add(cov.gain_noise(mean, vector.vector_cov()))
        propagator.note(node, "gain", "input and gain independent" if noise else "")
        return fresh(mean * shift, scaled, node.shape, tokens, features, branches)
    return None


def _broadcast(weight: Weight, shape: tuple[int, ...]) -> Weight:
    return Weight(weight.posterior, np.broadcast_to(weight.places, shape))
