"""The receipt of one pass: its operations, and stages for `closure_report`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
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


class Steps(list[Step]):
    """The operations of one pass; prints as a table."""

    def __str__(self) -> str:
        rows = [("rule", "shape", "assumes", "where")]
        rows += [(x.rule, "x".join(map(str, x.shape)), x.assumes, x.where) for x in self]
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join((*(x.ljust(n) for x, n in zip(row, wide, strict=False)), row[3])).rstrip()
            for row in rows
        )


class Receipt(Steps):
    """The operations of one pass, in the order in which their moments were computed.

    `mj.reference.closure_report(receipt, x, structures, key)` checks it stage by stage. Stages end at
    arrays through which everything later passes, and share no weights.
    """

    def __init__(self, propagator: Propagator) -> None:
        super().__init__(propagator.steps.values())
        self._propagator = propagator

    def sequence(self, x: Any) -> Array:
        """The input as rows of features."""
        return jnp.reshape(x, (-1, jnp.shape(x)[-1])).astype(float)

    @property
    def stages(self) -> list[Stage]:
        """The stages, from one cut to the next; the last ends at the function's output."""
        steps, output = self._propagator.steps, self._propagator.output
        cuts = [*_cuts(list(steps), output), output]
        names = (f"{steps[n].rule} {steps[n].where}" if n in steps else n.op for n in cuts)
        starts = [None, *cuts[:-1]]
        return [Stage(*one, self._propagator) for one in zip(names, starts, cuts, strict=True)]


def _cuts(nodes: list[Node], output: Node) -> list[Node]:
    """Nodes that separate everything before them, weights included, from everything after."""
    found: list[Node] = []
    for node in sorted(nodes, key=lambda n: n.index):
        if node is output or is_view(node) or not jnp.issubdtype(node.dtype, jnp.floating):
            continue
        before, after = between(node, []), between(output, [node])
        apart = not overlap(node.weights, weights_of(output, [node], lambda n: n.nodes))
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
        self.inner = between(self.end, [self.start])
        self.axes = {n: _axes(n) for n in (self.start, self.end) if n is not None}

    def moments(self, mean: Array, cov: Any) -> tuple[Array, Any]:
        """Moments of the end, given those of the start as a sequence."""

        def one_pass(propagator: Propagator) -> Moments:
            for node in self.inner:
                node.moments = None
            if self.start is not None:
                given = fresh(mean, cov, self.start.shape, *self.axes[self.start], ())
                self.start.moments = propagator.pooled(given)
                given.base.node = self.start
            return propagator.moments(self.end)

        kept = [(node, node.moments) for node in between(self.end, [])]
        try:
            own = {name: getattr(self.propagator, name) for name in ("landmarks", "output")}
            m = type(self.propagator)(type(cov), **own).run(one_pass)
        finally:
            for node, moments in kept:
                node.moments = moments
        found = m.sequence(*self.axes[self.end])
        return found.mean, found.cov

    def draw(self, key: Array, x: Array) -> Array:
        """The end in one sampled network, given the start as a sequence."""
        weights = weights_of(self.end, [self.start], lambda n: n.nodes)
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
