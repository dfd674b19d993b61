"""The receipt of one pass: its operations, their costs, and stages for `closure_report`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import Axes, Moments, as_rows, by_last_axis, fresh, ordered
from moment_jax.propagation.primitives import is_view
from moment_jax.propagation.regions import between, compute, weights_of
from moment_jax.propagation.weights import overlap

if TYPE_CHECKING:
    from moment_jax.propagation.propagator import Propagator


class Step(NamedTuple):
    """One operation of a receipt."""

    operation: str  # the primitive
    rule: str  # that computed its moments
    assumes: str
    where: str  # file and line in the user's program
    shape: tuple[int, ...]
    cost: int = 0  # multiply-adds of matrix products; elementwise functions and copies are free


class Receipt(list[Step]):
    """The operations of one pass, in the order in which their moments were computed.

    `mj.reference.closure_report(receipt, x, structures, key)` checks it stage by stage. Stages end at
    arrays through which everything later passes, and share no weights.
    """

    def __init__(self, steps: list[Step], propagator: Propagator) -> None:
        super().__init__(steps)
        self._propagator = propagator

    def sequence(self, x: Any) -> Array:
        """The input as rows of features."""
        return jnp.reshape(x, (-1, jnp.shape(x)[-1])).astype(float)

    @property
    def stages(self) -> list[Stage]:
        """The stages, from one cut to the next; the last ends at the function's output."""
        nodes, output = self._propagator.noted, self._propagator.output
        steps = dict(zip(nodes, self, strict=True))
        cuts = [*_cuts(nodes, output), output]
        names = (f"{steps[n].rule} {steps[n].where}" if n in steps else n.op for n in cuts)
        starts = [None, *cuts[:-1]]
        return [Stage(*one, self._propagator) for one in zip(names, starts, cuts, strict=True)]


def _cuts(nodes: list[Node], output: Node) -> list[Node]:
    """Nodes that separate everything before them, weights included, from everything after."""
    found: list[Node] = []
    for node in sorted(set(nodes), key=lambda n: n.index):
        if node is output or is_view(node) or not jnp.issubdtype(node.dtype, jnp.floating):
            continue
        before, after = between(node, None), between(output, node)
        apart = not overlap(node.weights, weights_of(output, node))
        if apart and not before & after and (not found or found[-1] in before):
            found.append(node)
    return found


@dataclasses.dataclass
class Stage:
    """The part of a function between two random arrays; `start` None is the input."""

    name: str
    start: Node | None
    end: Node
    propagator: Propagator  # of the whole function

    def __post_init__(self) -> None:
        self.inner = between(self.end, self.start)
        self.axes = {n: _axes(n) for n in (self.start, self.end) if n is not None}

    def moments(self, mean: Array, cov: Any) -> tuple[Array, Any]:
        """Moments of the end, given those of the start as a sequence."""

        def one_pass(propagator: Propagator) -> Moments:
            for node in self.inner:
                node.moments = node.line = None
            if self.start is not None:
                given = fresh(mean, cov, self.start.shape, *self.axes[self.start])
                self.start.moments = propagator.pooled(given)
            return propagator.moments(self.end)

        kept = [(node, node.moments, node.line) for node in between(self.end, None)]
        try:
            m = type(self.propagator)(type(cov)).run(one_pass)
        finally:
            for node, moments, line in kept:
                node.moments, node.line = moments, line
        found = m.sequence(*self.axes[self.end])
        return found.mean, found.cov

    def draw(self, key: Array, x: Array) -> Array:
        """The end in one sampled network, given the start as a sequence."""
        weights = weights_of(self.end, self.start)
        beliefs = {id(w.posterior): w.posterior for w in weights}
        keys = jax.random.split(key, max(len(beliefs), 1))
        known: dict[Any, Any] = {
            i: w.sample(k) for (i, w), k in zip(beliefs.items(), keys, strict=False)
        }
        if self.start is not None:
            places = ordered(self.start.shape, *self.axes[self.start])
            known[self.start] = x.reshape(-1)[places].astype(self.start.dtype)
        (end,) = compute([self.end], known)
        return as_rows(end, *self.axes[self.end])


def _axes(node: Node) -> tuple[Axes, Axes]:
    """The token and feature axes that the pass used."""
    return by_last_axis(node.ndim) if node.moments is None else node.moments.natural()


def scope(node: Node) -> str:
    """Name scope of the operations that compute a node's moments."""
    return f"moments_{node.index}"


def costs(jaxpr: Any, outer: int = -1, times: int = 1) -> Counter[int]:
    """Multiply-adds of matrix products by innermost `scope`."""
    total: Counter[int] = Counter()
    for eqn in jaxpr.eqns:
        scopes = re.findall(r"moments_(\d+)", str(eqn.source_info.name_stack))
        owner = int(scopes[-1]) if scopes else outer
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = (eqn.invars[0].aval.shape[i] for i in contracted)
            total[owner] += times * math.prod(inner) * int(np.prod(eqn.outvars[0].aval.shape))
        repeated = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        for inside in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inside):
                total += costs(getattr(inside, "jaxpr", inside), owner, repeated)
    return total


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")
