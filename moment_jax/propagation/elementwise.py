"""Elementwise functions of one random array, recognised by their operations and values."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax import expectations
from moment_jax.expectations import ElementwiseMoments
from moment_jax.expectations.activations import with_jumps
from moment_jax.expectations.quadrature import resolving
from moment_jax.propagation.errors import refuse, register
from moment_jax.propagation.graph import Node
from moment_jax.propagation.jumps import Pieces, at, breaks, jumps_at, pieces_of
from moment_jax.propagation.moments import Moments
from moment_jax.propagation.normalization import log_probabilities
from moment_jax.propagation.propagator import Propagator, pattern
from moment_jax.propagation.regions import BENDING, GELU, RATIONAL, Univariate, univariate

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
    mean, cov = x.mean, x.cov
    name, transform, assumes = recognised(found, node)
    if isinstance(transform, Pieces):
        gain = jnp.full((1, mean.shape[1]), transform.slopes[0], mean.dtype)
        out, out_cov = mean * gain + jnp.asarray(transform.value, mean.dtype), cov.rescale(gain)
    else:
        moments = transform(mean, cov.variance())
        gain, out, out_cov = moments.gain, moments.mean, cov.elementwise(moments)
    propagator.note(node, name, assumes)
    return x.changed(out, out_cov, node.shape, lambda cross: cross.rescale(gain))


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
            bends, slopes, value, steps = pieces
            if steps:
                return "steps", lambda m, v: with_jumps(m, v, *pieces), gaussian
            if not bends:
                return "linear", pieces, ""
            if (bends, slopes, value) == ([0.0], [0.0, 1.0], 0.0):
                return "relu", expectations.rectified, gaussian
            fn = expectations.piecewise_linear
            return "piecewise linear", lambda m, v: fn(m, v, bends, slopes, value), gaussian
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
