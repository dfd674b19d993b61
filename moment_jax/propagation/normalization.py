"""Normalisations and softmax over the features, recognised by their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.layers.norm import layer_norm_and_tangent
from moment_jax.layers.params import NormParams
from moment_jax.layers.softmax import softmax
from moment_jax.propagation.branches import Branch
from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import Moments, fresh
from moment_jax.propagation.propagate import Propagator, pattern
from moment_jax.propagation.regions import BY_ROW, REDUCTIONS, compute, sources, stand_in

Array = jax.Array


class Normalization(NamedTuple):
    """factor * (x - avg(x)) / sqrt(var(x) + epsilon), or without the average."""

    centres: bool
    epsilon: float
    factor: float


@pattern
def _by_row(propagator: Propagator, node: Node) -> Moments | None:
    found = _row_function(node)
    if found is None:
        return None
    source, axes = found

    def fn(x: np.ndarray) -> np.ndarray:
        with jax.ensure_compile_time_eval():
            value = jnp.asarray(x, source.dtype).reshape(source.shape)
            return np.asarray(compute(node, {source: value}, stand_in), float)

    kind = _recognised(fn, source, axes)
    if kind is None:
        return None
    m = propagator.moments(source)
    features = tuple(i for i in axes)
    tokens = tuple(i for i in range(len(m.shape)) if i not in features)
    mean, cov = m.sequence(tokens, features)
    if kind == "softmax":
        out = softmax(mean, cov)
        propagator.note(node, "softmax", "its input Gaussian")
        return fresh(*out, node.shape, tokens, features)
    out_mean, out_cov, tangent = layer_norm_and_tangent(
        mean, cov, NormParams(), kind.epsilon, 2, centres=kind.centres
    )
    if kind.factor != 1:
        factor = jnp.full((1, mean.shape[1]), kind.factor, mean.dtype)
        out_mean, out_cov = out_mean * factor, out_cov.rescale(factor)
        tangent = tangent._replace(scale=factor)
    propagator.note(node, "layer_norm" if kind.centres else "rms_norm", "its input Gaussian")
    out_moments = fresh(out_mean, out_cov, node.shape, tokens, features)
    return dataclasses.replace(out_moments, branch=Branch(mean, out_mean, out_cov, tangent))


def _row_function(node: Node) -> tuple[Node, tuple[int, ...]] | None:
    """The nearest array of the same shape that all of it is made of, and the axes that are reduced."""
    if node.op not in ("mul", "div", "sub", "add"):
        return None
    reduced: set[tuple[int, ...]] = set()

    def expandable(n: Node) -> bool:
        if n.op in REDUCTIONS:
            (operand,) = n.nodes[:1]
            if operand.ndim != node.ndim:
                return False
            reduced.add(tuple(n.params["axes"]))
        return n.op in BY_ROW

    for source in sources(node, expandable):
        if reduced and source.shape == node.shape:
            return (source, next(iter(reduced))) if len(reduced) == 1 else None
        if len(reduced) > 1:
            return None
    return None


def _recognised(
    fn: Callable[[np.ndarray], np.ndarray], source: Node, axes: tuple[int, ...]
) -> Normalization | str | None:
    x = np.random.default_rng(0).normal(size=source.shape)
    y = fn(x)
    close = 1e3 * float(jnp.finfo(source.dtype).eps)
    weights = np.exp(x) / np.exp(x).sum(axes, keepdims=True)
    if np.allclose(y, weights, atol=close):
        return "softmax"
    for centres in (True, False):
        z = x - x.mean(axes, keepdims=True) if centres else x
        z = z / np.sqrt((z**2).mean(axes, keepdims=True))
        wide, small = fn(1e3 * z), 1e-3
        factor = float((wide * z).mean())
        if factor == 0 or not np.allclose(wide, factor * z, atol=close * abs(factor)):
            continue
        kept = float((fn(small * z) * z).mean()) / factor
        epsilon = small**2 * max(1 / kept**2 - 1, 0.0)
        factor = 1.0 if abs(factor - 1) < close else factor
        kind = Normalization(centres, float(f"{epsilon:.5g}"), factor)
        moved = x - x.mean(axes, keepdims=True) if centres else x
        expected = factor * moved / np.sqrt((moved**2).mean(axes, keepdims=True) + epsilon)
        if np.allclose(y, expected, atol=close * abs(factor)):
            return kind
    return None
