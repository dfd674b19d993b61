"""Covariances of two arrays of the graph, wherever a linear operation or a product joins them.

Each `Base` knows of what it is made, and how it carries covariances with that. So Cov[u, v] is found by
walking back: it is what the later one of the two makes of Cov[u, its parents]. The walk ends where both
are one array, or have no weight in common.
"""

from functools import reduce
from typing import Any

from moment_jax.covariance.cross import plus
from moment_jax.propagation.errors import refuse, register, shapes, where
from moment_jax.propagation.graph import Node, weights_in
from moment_jax.propagation.moments import Base, Sequence, as_it_is
from moment_jax.propagation.propagator import Propagator
from moment_jax.propagation.regions import weights_of
from moment_jax.propagation.weights import overlap


def covariance(propagator: Propagator, node: Node, a: Sequence, b: Sequence) -> Any:
    """Cov[a, b] in the structure's own form, where `node` joins them; None if it is zero."""
    found = _between(propagator, node, a.base, b.base)
    found = _arranged(node, found, b)
    if found is not None:
        found = _arranged(node, found.T, a)
    return None if found is None else found.T


def joined(propagator: Propagator, node: Node, parts: list[Sequence]) -> Base:
    """The sum of sequences of one shape, with all their covariances."""
    mean, cov = parts[0].mean, parts[0].cov
    for i, x in enumerate(parts[1:], 1):
        crosses = (covariance(propagator, node, y, x) for y in parts[:i])
        mean, cov = mean + x.mean, cov.add_branch(x.cov, reduce(plus, crosses, None))
    return Base(mean, cov, tuple((x, as_it_is) for x in parts))


def _between(propagator: Propagator, node: Node, u: Base, v: Base) -> Any:
    if u.index > v.index:
        found = _between(propagator, node, v, u)
        return None if found is None else found.T
    if u is v:
        return v.cov.with_itself()
    mine, others = weights_in(u.node), weights_in(v.node)
    if not overlap(mine, others):
        return None
    if (u, v) not in propagator.crosses:
        if v.parents is None:
            raise _shared(node, v, "no rule tells how it depends on what came before", "")
        if overlap(_own(v), mine):
            batch = "One call on both inputs, as a batch jnp.stack([a, b]), uses them once. "
            raise _shared(node, v, "both use the same weights", batch)
        total = None
        for x, carry in v.parents:
            given = _arranged(node, _between(propagator, node, u, x.base), x)
            total = plus(total, None if given is None else carry(given))
        propagator.crosses[u, v] = total
    return propagator.crosses[u, v]


def _own(v: Base) -> list[Any]:
    """The weights between an array and its parents."""
    if not isinstance(v.node, Node):
        return [v.node]
    parents = {x.base for x, _ in v.parents or ()}
    starts = {base.node for base in parents}

    def before(node: Node) -> list[Node]:
        return [n for n in node.origins if n.moments is None or n.moments.base not in parents]

    return weights_of(v.node, starts, before)


def _arranged(node: Node, cross: Any, x: Sequence) -> Any:
    if cross is None:
        return None
    found = x.arranged(cross)
    if found is None:
        raise refuse(
            f"`{node.op}` of two arrays with a random array in common, of which one was rearranged "
            f"so that its tokens and features {tuple(x.base.mean.shape)} are mixed",
            node.source,
            f"Use structure=mj.Full. {register(node)}",
        )
    return found


def _shared(node: Node, v: Base, why: str, fix: str) -> Exception:
    place = f" (one from {where(v.node.source)}: {why})" if isinstance(v.node, Node) else ""
    return refuse(
        f"`{node.op}` of random {shapes(node.operands)}, which have a random array in common{place}",
        node.source,
        f"No rule or pattern covers it. {fix}{register(node)}",
    )
