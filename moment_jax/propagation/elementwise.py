"""Elementwise functions of one random array, and the feed-forward layer around them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from moment_jax.expectations import recognition
from moment_jax.expectations.quadrature import at
from moment_jax.layers.params import DenseParams, FeedForwardParams
from moment_jax.layers.rules import rules_of
from moment_jax.propagation.arrays import Base, Moments, Sequence, made, numbered
from moment_jax.propagation.dense import projection, read_dense
from moment_jax.propagation.errors import refuse, register
from moment_jax.propagation.graph import Node, independent
from moment_jax.propagation.normalization import log_probabilities
from moment_jax.propagation.propagator import Propagator, pattern
from moment_jax.propagation.regions import Univariate, univariate


@pattern
def _univariate(propagator: Propagator, node: Node) -> Moments | None:
    found = univariate(node)
    if found is None:
        return None
    # The logarithm of a probability is nearer to Gaussian than the probability.
    logs = log_probabilities(propagator, found.source) if "log" in found.operations else None
    fn = found.fn
    of_log = found._replace(fn=lambda x: fn(jnp.exp(x)))
    if logs is None or not np.isfinite(at(of_log.fn, np.linspace(-3, 3, 64))).all():
        x = propagator.moments(found.source).sequence()
    else:  # all but such as log(1 - p)
        found, x = of_log, logs.sequence()
    name, transform, assumes = recognised(found, node)

    def compute() -> tuple[Any, ...]:
        mean, cov = x.moments
        if name == "linear":
            gain = jnp.full((1, mean.shape[1]), transform.slopes[0], mean.dtype)
            out, cov = mean * gain + jnp.asarray(transform.value, mean.dtype), cov.rescale(gain)
        else:
            moments = transform(mean, cov.variance())
            gain, out, cov = moments.gain, moments.mean, cov.elementwise(moments)
        return out, cov, lambda cross: cross.rescale(gain)

    propagator.note(node, name, assumes)
    return x.made(compute, node.shape)


def recognised(found: Univariate, node: Node) -> tuple[str, Any, str]:
    """The name of the function by which `node` is made, its transform, and what this assumes.

    The transform of a linear function is its only piece, `Pieces`.
    """
    name, transform, assumes = recognition.recognised(found.fn, found.source.dtype)
    if transform is None:
        raise refuse("a function that jumps", node.source, register(node))
    return name, transform, assumes


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
        layout = Moments(Base(shape, tuple), hidden.places)  # no numbers are asked for
        output = read_dense(propagator, node, layout)
        apart = independent(*node.operands) and independent(*hidden.product.operands)
        if output is None or not output.x.same(layout.base.at(numbered(shape))) or not apart:
            continue
        if output.layer.kernel.shape[1] != d or width < d:
            continue
        name, transform, _ = recognised(found, value)
        if name == "linear":
            continue
        last = FeedForwardParams(hidden.layer, DenseParams(output.layer.kernel)), transform

        def compute(x: Sequence = x, last: Any = last) -> Any:
            return rule(x.mean, x.cov, *last)

        propagator.note(node, f"feed_forward ({name})", "input and kernels independent")
        return made(compute, x.shape, output.places, x)
    return None
