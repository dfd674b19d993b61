"""Linearises operations that no structured rule covers."""

import jax.numpy as jnp
import numpy as np

from moment_jax.propagation import origins
from moment_jax.propagation.errors import PropagationError, refuse
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Axes, Moments, as_rows, fresh
from moment_jax.propagation.primitives import VIEWS
from moment_jax.propagation.propagator import LAST, PATTERNS, RULES, Propagator, rule
from moment_jax.propagation.regions import BY_ROW


@rule("dot_general", "cumsum", "scatter", "scatter-add", *sorted(BY_ROW - VIEWS), last=True)
def _linearised(propagator: Propagator, node: Node) -> Moments | None:
    """The array linearised in its nearest dominator and in the weights in between.

    Used for attention with normalised queries or score biases, for example.
    """
    if not node.nodes or not jnp.issubdtype(node.dtype, jnp.floating):
        return None
    source = _source(node, propagator.tied)
    weights = origins.weights_of(node, source)
    for inner in origins.between(node, source):
        if inner.op != "belief" and (inner.op == "argmax" or inner.op not in {**RULES, **LAST}):
            propagator.moments(inner)  # raises
    cov = origins.joint(propagator, [node], source, weights)
    if cov is None:
        raise refuse(
            f"`{node.op}` of random {', '.join(str(tuple(np.shape(x))) for x in node.operands)}, which "
            f"has no rule and a Jacobian of more than {origins.LARGEST} entries",
            node.source,
            f'Register a rule with mj.propagation_rule("{node.op}"), or compute this part from certain '
            "weights.",
        )
    known = {} if source is None else {source: propagator.moments(source).array()}
    (mean,) = origins.values([node], {n: x.astype(n.dtype) for n, x in known.items()})
    tokens, features = _axes(propagator, node)
    index = np.arange(mean.size).reshape(node.shape)
    dense = origins.as_sequence(cov, index, index, tokens, features)
    mean = as_rows(mean, tokens, features)
    propagator.note(node, "linearised", "weights independent of what they are applied to")
    return fresh(mean, propagator.structure.project(dense), node.shape, tokens, features)


def _source(node: Node, tied: bool) -> Node | None:
    """The nearest dominator that shares no weights with what lies between it and the node."""

    def apart(source: Node) -> bool:
        before = origins.weights_of(source, None)
        return not origins.weights_of(node, source).keys() & before.keys()

    source = origins.dominator(list(node.nodes), tied)
    while source is not None and not apart(source):
        source = origins.dominator(list(source.nodes), tied)
    return source


def _tied(propagator: Propagator, node: Node) -> Moments | None:
    """Weights applied to arrays that depend on them: tied embeddings or projections, repeated layers."""
    if not propagator.tied or not (origins.knows_its_weights(node) or origins.share_a_weight(node)):
        return None
    try:
        return _linearised(propagator, node)
    except PropagationError:
        propagator.note(
            node, "tied weights", "taken as independent: too large for a dense covariance"
        )
        return None


def _axes(propagator: Propagator, node: Node) -> tuple[Axes, Axes]:
    """Token and feature axes; a product of two random arrays (attention) keeps those of its values."""
    features: tuple[int, ...] = (node.ndim - 1,) if node.ndim else ()
    if node.op == "dot_general" and all(map(is_random, node.operands)):
        contract, batch = node.params["dimension_numbers"]
        # The values are computed before the attention weights.
        side = min((0, 1), key=lambda i: getattr(node.operands[i], "index", 0))
        operand = node.operands[side]
        by_feature = propagator.moments(operand).natural()[1]
        free = [
            [i for i in range(x.ndim) if i not in (*c, *b)]
            for x, c, b in zip(node.operands, contract, batch, strict=True)
        ]
        shown = [*batch[side], *([None] * len(free[0]) if side else free[0])]
        shown += free[1] if side else [None] * len(free[1])
        features = tuple(i for i, axis in enumerate(shown) if axis in by_feature)
    return tuple(i for i in range(node.ndim) if i not in features), features


PATTERNS.insert(0, _tied)  # before attention, which assumes weights of its own
