"""Elementwise functions of one random array, however they are written, and products of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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
    before = branches_of(m, mean, tokens, features)
    if name == "linear":
        with jax.ensure_compile_time_eval():
            shift = fn(jnp.zeros((), mean.dtype))
            slope = jnp.full((1, mean.shape[1]), fn(jnp.ones((), mean.dtype)) - shift, mean.dtype)
        out, out_cov = mean * slope + shift, cov.rescale(slope)
        branches = through_gain(before, slope, cov, out_cov, mean)
    else:
        moments = _moments(name, fn, mean, cov.variance())
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
    return expectations.elementwise(fn, mean, variance)


def recognised(fn: Callable[[Array], Array], dtype: jnp.dtype) -> str:
    """What a function of numbers is, by its values: linear, relu, gelu, or another."""
    with jax.ensure_compile_time_eval():
        x = jnp.linspace(-6, 6, 49, dtype=dtype)
        y = jax.vmap(fn)(x)
        candidates = {
            "linear": y[24] + (y[-1] - y[0]) / 12 * x,
            "relu": jnp.maximum(x, 0),
            "gelu": jax.nn.gelu(x, approximate=False),
        }
        close = 32 * float(jnp.finfo(dtype).eps) * (1 + float(np.max(np.abs(np.asarray(y)))))
        for name, expected in candidates.items():
            if float(jnp.max(jnp.abs(y - expected))) <= close:
                return name
    return "quadrature"
