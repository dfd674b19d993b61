"""A Transformer's feed-forward layer, which `Separable` has one formula for."""

import jax.numpy as jnp
import numpy as np

from moment_jax.covariance import Diagonal
from moment_jax.layers.params import DenseParams, FeedForwardParams
from moment_jax.layers.rules import rules_of
from moment_jax.propagation.dense import projection, read_dense
from moment_jax.propagation.elementwise import recognised
from moment_jax.propagation.graph import Node, independent
from moment_jax.propagation.jumps import Pieces
from moment_jax.propagation.moments import Base, Moments, made
from moment_jax.propagation.propagator import Propagator, pattern
from moment_jax.propagation.regions import univariate


@pattern
def _feed_forward(propagator: Propagator, node: Node) -> Moments | None:
    """A dense layer, a function, and a dense layer back to as many features, in `Separable`."""
    rule = rules_of(propagator.structure).feed_forward
    if node.op != "dot_general" or rule is None:
        return None
    for value in node.nodes:
        found = univariate(value)
        hidden = None if found is None else projection(propagator, found.source)
        if found is None or hidden is None or hidden.turn is not None:
            continue
        x, (d, width) = hidden.x, hidden.layer.kernel.shape
        if len(x.mean) == 1:  # no tokens that share noise: layer by layer is nearer
            continue
        shape = len(x.mean), width
        layout = Moments(
            Base(jnp.zeros(shape), Diagonal.zeros(shape), None), np.asarray(hidden.places)
        )
        output = read_dense(propagator, node, layout)
        apart = independent(*node.operands) and independent(*hidden.product.operands)
        if output is None or output.x.mean is not layout.mean or not apart:
            continue
        if output.layer.kernel.shape[1] != d or width < d:
            continue
        name, transform, _ = recognised(found, value)
        if isinstance(transform, Pieces):
            continue
        params = FeedForwardParams(hidden.layer, DenseParams(output.layer.kernel))
        mean, cov, carry = rule(x.mean, x.cov, params, transform)
        propagator.note(node, f"feed_forward ({name})", "input and kernels independent")
        return made(mean, cov, output.places, (x, carry))
    return None
