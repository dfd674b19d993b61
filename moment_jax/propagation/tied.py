"""Tied weights: a product with a weight on which its other factor depends, such as a tied embedding."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from moment_jax.propagation.errors import LINEARISE, refuse, shapes
from moment_jax.propagation.graph import Node
from moment_jax.propagation.linearisation import carried
from moment_jax.propagation.moments import Moments, as_rows, by_last_axis, entries, fresh
from moment_jax.propagation.propagator import PATTERNS, RULES, Propagator
from moment_jax.propagation.regions import BY_ROW, between, compute, dominators, weights_of
from moment_jax.propagation.weights import overlap

LARGEST = 2**24  # most entries of a Jacobian


def _separates(source: Node, node: Node) -> bool:
    floating = jnp.issubdtype(source.dtype, jnp.floating)
    return floating and not overlap(source.weights, weights_of(node, source))


def _tied(propagator: Propagator, node: Node) -> Moments | None:
    """Linearised in the nearest array that shares no weight with what follows, and in these weights."""
    if not node.tied:
        return None
    source = next((n for n in dominators(node.nodes) if _separates(n, node)), None)
    inner, weights = between(node, source), weights_of(node, source)
    known = (BY_ROW | RULES.keys()) - {"argmax"}
    forms = itertools.combinations(weights, 2)
    one_form = not any(a.posterior is not b.posterior and overlap([a], [b]) for a, b in forms)
    if node.op != "dot_general" or not one_form or not all(n.op in known for n in inner):
        raise refuse(
            f"`{node.op}` of random {shapes(node.operands)}, one of them a weight on which another "
            "depends",
            node.source,
            f"One weight can be used twice in products such as a tied embedding. Else {LINEARISE}.",
        )
    beliefs = {id(w.posterior): w.posterior for w in weights}
    before: Any = None if source is None else propagator.moments(source)
    start: dict[Any, Any] = {i: belief.mean for i, belief in beliefs.items()}
    if before is not None:
        start[source] = before.array()
    if node.size * max(node.size, *(x.size for x in start.values())) > LARGEST:
        raise refuse(
            f"a product with a tied weight whose Jacobian has more than {LARGEST} entries",
            node.source,
            f"Use weights of its own, or {LINEARISE}.",
        )
    keys = list(start)

    def output(at: list[Any]) -> Any:
        values = dict(zip(keys, at, strict=True))
        if source is not None:
            values[source] = values[source].astype(source.dtype)
        return compute([node], values)[0]

    at = [start[key] for key in keys]
    jacobians = dict(zip(keys, jax.jacrev(output)(at), strict=True))
    total: Any = 0
    for key, jacobian in jacobians.items():
        j = jacobian.reshape(node.size, -1)
        if isinstance(key, Node):
            total = total + j @ entries(before.cov, before.places.ravel()) @ j.T
        else:
            total = total + carried(beliefs[key], j)
    axes = by_last_axis(node.ndim)
    mean = as_rows(output(at), *axes)
    cov = propagator.structure.project(total.reshape(*mean.shape, *mean.shape))
    propagator.note(node, "tied weights", "linearised in the weights")
    return fresh(mean, cov, node.shape, *axes)


PATTERNS.insert(
    0, _tied
)  # before the others, which assume that operands and weights are independent
