"""Linearises operations that no structured rule covers."""

import jax.numpy as jnp
import numpy as np

from moment_jax.propagation import origins
from moment_jax.propagation.errors import PropagationError, refuse, register, shapes
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Axes, Moments, as_rows, fresh
from moment_jax.propagation.primitives import VIEWS, factors
from moment_jax.propagation.propagator import LAST, PATTERNS, RULES, Propagator, rule
from moment_jax.propagation.regions import BY_ROW
from moment_jax.propagation.weights import Weight


@rule("dot_general", "cumsum", "scatter", "scatter-add", *sorted(BY_ROW - VIEWS), last=True)
def _linearised(propagator: Propagator, node: Node) -> Moments | None:
    """The array linearised in its nearest dominator and in the weights in between.

    Used for attention with normalised queries or score biases, for example.
    """
    if not node.nodes or not jnp.issubdtype(node.dtype, jnp.floating):
        return None
    source = origins.dominator(node.nodes, propagator.tied, [node])
    weights = origins.weights_of(node, source)
    for inner in origins.between(node, source):
        if inner.op != "belief" and (
            inner.op == "argmax" or not (RULES[inner.op] or LAST[inner.op])
        ):
            propagator.moments(inner)  # raises
    cov = origins.joint(propagator, [node], source, weights)
    if cov is None:
        raise refuse(
            f"`{node.op}` of random {shapes(node.operands)}, which has no rule and a Jacobian of more "
            f"than {origins.LARGEST} entries",
            node.source,
            register(node),
        )
    known = {} if source is None else {source: propagator.moments(source).array()}
    (mean,) = origins.values([node], {n: x.astype(n.dtype) for n, x in known.items()})
    axes = _axes(propagator, node)
    index = np.arange(node.size).reshape(node.shape)
    cov = propagator.structure.project(origins.as_sequence(cov, index, index, axes))
    propagator.note(node, "linearised", "weights independent of what they are applied to")
    return fresh(as_rows(mean, *axes), cov, node.shape, *axes)


def _tied(propagator: Propagator, node: Node) -> Moments | None:
    """Weights applied to arrays that depend on them: tied embeddings or projections, repeated layers."""
    if not propagator.tied or not (_knows_its_weights(node) or _shares_a_weight(node)):
        return None
    try:
        return _linearised(propagator, node)
    except PropagationError:
        propagator.note(
            node, "tied weights", "taken as independent: too large for a dense covariance"
        )
        return None


PATTERNS.insert(0, _tied)  # before attention, which assumes weights of its own


def _knows_its_weights(node: Node) -> bool:
    """Whether one operand is a weight that another depends on, such as a tied embedding."""
    own = {id(x.posterior) for x in node.operands if isinstance(x, Weight)}
    return bool(own) and any(own & origins.weights_of(x, None).keys() for x in node.nodes)


def _shares_a_weight(node: Node) -> bool:
    """Whether a product's factors apply the same weight to one array: tied projections."""
    if node.op != "dot_general" or len(node.nodes) != 2:
        return False
    source = origins.dominator(node.nodes, True)
    left, right = (origins.weights_of(x, source) for x in node.nodes)
    return bool(left.keys() & right.keys())


def _axes(propagator: Propagator, node: Node) -> tuple[Axes, Axes]:
    """Token and feature axes; a product of two random arrays (attention) keeps those of its values."""
    features: tuple[int, ...] = (node.ndim - 1,) if node.ndim else ()
    if node.op == "dot_general" and all(map(is_random, node.operands)):
        # The values are computed before the attention weights.
        side = min((0, 1), key=lambda i: getattr(node.operands[i], "index", 0))
        by_feature = propagator.moments(node.operands[side]).natural()[1]
        left, right = factors(node)
        shown = [i if side == 0 else j for i, j in zip(left.batch, right.batch, strict=True)]
        shown += left.free if side == 0 else [-1] * len(left.free)
        shown += right.free if side == 1 else [-1] * len(right.free)
        features = tuple(i for i, axis in enumerate(shown) if axis in by_feature)
    return tuple(i for i in range(node.ndim) if i not in features), features
