"""Loops that are kept: scans over stacked weights, equal blocks, and `jax.checkpoint`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from moment_jax.propagation import arrays, errors
from moment_jax.propagation.arrays import Base, Moments, Sequence
from moment_jax.propagation.errors import PropagationError, Step
from moment_jax.propagation.graph import Node, Value, weights_in
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.recorder import Recorder
from moment_jax.propagation.regions import weights_of
from moment_jax.propagation.weights import Weight

_SHARED = "structure", "landmarks", "pool", "reading", "output"
_Carry = tuple[Array, Any]  # mean and covariance of what a loop carries
_Start = Callable[[Propagator], Any]  # what enters a body, as a value of its propagator's


@dataclasses.dataclass(frozen=True, eq=False)
class _Loop:
    """What is computed again and again: propagated as anything else, of arrays of known moments."""

    propagator: Propagator  # of the graph that holds the loop
    node: Node
    outer: dict[Node, Moments]  # the random operands

    @property
    def start(self) -> Any:
        """What enters at first."""
        return self.node.operands[self.node.params["carry"]]

    def given(self, x: Sequence, numbers: Callable[[], _Carry], of: Value) -> _Start:
        """An array laid out as x, with these moments, that depends on what another depends on."""
        weights = weights_in(of)
        own = frozenset(weights_of(of, [])) if isinstance(of, Node) else weights
        places = arrays.ordered(self.node.shape, *x.axes)
        return lambda inner: inner.given(
            Moments(Base(x.shape, numbers), places), self.start.dtype, own, weights - own
        )

    def planned(
        self,
        start: _Start,
        rows: dict[int, Any],
        steps: dict[Node, Step],
        stand_for: range = range(1),
    ) -> tuple[Value, Moments]:
        """The output of what enters and of a row of each stack; nothing is computed."""
        p, outside = self.node.params, self.propagator
        inner = Propagator(**{name: getattr(outside, name) for name in _SHARED})
        inner.repeats.update(outside.repeats)

        def argument(i: int, value: Any) -> Any:
            if i == p["carry"]:
                return start(inner)
            if i in rows:
                return value.of_rows(rows[i], stand_for) if isinstance(value, Weight) else rows[i]
            if not isinstance(value, Node):
                return value
            base, places = self.outer[value].base, self.outer[value].places
            known = Moments(Base(base.shape, lambda: base.numbers[:2]), places)
            return inner.given(known, value.dtype, value.weights)

        arguments = [argument(i, value) for i, value in enumerate(self.node.operands)]
        (out,) = Recorder(inner.repeats).run(p["body"], p["consts"], arguments)
        found = inner.moments(out)
        steps.update(inner.steps)
        outside.pool, outside.reading = inner.pool, inner.reading
        return out, found

    def result(self, y: Sequence, compute: Callable[[], _Carry]) -> Moments:
        """The output, laid out as y."""

        def computed() -> _Carry:
            for known in self.outer.values():
                known.base.numbers  # noqa: B018 (before the loop, not in it)
            return compute()

        return Moments(Base(y.shape, computed, None), arrays.ordered(self.node.shape, *y.axes))


@rule("loop")
def _recomputed(propagator: Propagator, node: Node) -> Moments | None:
    """The moments of what `jax.checkpoint` computes, recomputed in the backward pass."""
    options = node.params["options"]
    if "length" in options:
        return None
    loop = _Loop(propagator, node, {v: propagator.moments(v) for v in node.nodes})
    x = loop.outer[loop.start].sequence()

    def planned(numbers: Callable[[], _Carry], steps: dict[Node, Step]) -> Sequence:
        return loop.planned(loop.given(x, numbers, loop.start), {}, steps)[1].sequence()

    def body(mean: Array, cov: Any) -> _Carry:
        return planned(lambda: (mean, _pooled_alike(propagator, cov)), {}).moments

    def compute() -> _Carry:
        return jax.checkpoint(body, **options)(x.mean, _pooled_alike(propagator, x.cov))

    return loop.result(planned(lambda: x.moments, propagator.steps), compute)


@rule("loop")
def _scanned(propagator: Propagator, node: Node) -> Moments:
    """The body's moments by one `lax.scan` over (mean, cov), with rows of the stacks as weights.

    Rows are independent, and what is carried depends on all that the first result depends on. The
    backward pass recomputes each step: to keep all of its arrays costs more memory, and more time.
    A first step that changes the layout, or what is kept of a covariance, stands before the loop. That
    of a certain array does not: with a covariance of zero the program has half the size.
    """
    loop = _Loop(propagator, node, {v: propagator.moments(v) for v in node.nodes})
    p, options, start = node.params, node.params["options"], loop.start
    stacks = dict(enumerate(node.operands[p["carry"] + 1 :], p["carry"] + 1))
    rows = {i: v.posterior if isinstance(v, Weight) else v for i, v in stacks.items()}
    row = jax.tree.map(lambda a: a[0], rows)
    x = propagator.moments(start).sequence()
    once: dict[Node, Step] = {}
    at_first = (
        loop.given(x, lambda: x.moments, start) if isinstance(start, Node) else lambda _: start
    )
    out, found = loop.planned(at_first, row, once)
    y = found.sequence()

    def planned(numbers: Callable[[], _Carry], rows: Any, steps: dict[Node, Step]) -> Sequence:
        later = range(1, options["length"])
        return loop.planned(loop.given(y, numbers, out), rows, steps, later)[1].sequence(*y.axes)

    # Once in advance, so that what it has no rule for is known before anything is computed.
    planned(lambda: y.moments, row, propagator.steps)
    alike = (x.shape, x.axes) == (y.shape, y.axes)
    if not alike:
        propagator.steps.update(once)

    def step(at: _Carry, rows: Any) -> tuple[_Carry, None]:
        mean, cov = at
        z = planned(lambda: (mean, _pooled_alike(propagator, cov)), rows, {}).moments
        kinds = [(jax.tree.structure(m), [a.dtype for a in jax.tree.leaves(m)]) for m in (z, at)]
        if kinds[0] != kinds[1]:
            what = "a loop that changes what is kept of a covariance"
            raise errors.refuse(what, node.source, "")
        return z, None

    holds = {"checkpoint", "remat2"} & {eqn.primitive.name for eqn in p["body"].eqns}
    body = step if holds else jax.checkpoint(step, prevent_cse=False)

    def scanned(at: _Carry, rows: Any) -> _Carry:
        at = at[0], _pooled_alike(propagator, at[1])
        return jax.lax.scan(body, at, rows, unroll=options["unroll"])[0]

    def compute() -> _Carry:
        if alike:
            try:
                return scanned(x.moments, rows)
            except PropagationError:  # the first step changes what is kept
                pass
        return scanned(y.moments, jax.tree.map(lambda a: a[1:], rows))

    propagator.note(node, "loop", "steps independent")
    return loop.result(y, compute)


def _pooled_alike(propagator: Propagator, cov: Any) -> Any:
    """The covariance with the propagator's own object as its pool, by which others recognise it."""
    pool = propagator.pool
    if pool is None or getattr(cov, "pool", pool) is pool or cov.pool.shape != pool.shape:
        return cov
    return dataclasses.replace(cov, pool=pool)
