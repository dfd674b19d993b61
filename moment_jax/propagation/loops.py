"""Loops that are kept: a scan over stacked weights, and what `jax.checkpoint` recomputes."""

import dataclasses
from typing import Any

import jax
from jax import Array

from moment_jax.propagation import arrays, errors
from moment_jax.propagation.arrays import Base, Moments, Sequence
from moment_jax.propagation.errors import Step
from moment_jax.propagation.graph import Node
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.recorder import Recorder
from moment_jax.propagation.regions import weights_of
from moment_jax.propagation.weights import Weight

_SHARED = "landmarks", "pool", "reading", "output"


@rule("loop")
def _loop(propagator: Propagator, node: Node) -> Moments:
    """The body's moments by one `lax.scan` over (mean, cov), or recomputed in the backward pass.

    The body is propagated as anything else, with rows of the stacks in place of the weights. What it
    carries depends on the weights before the loop, and rows of a stack are independent.
    """
    p, operands = node.params, node.operands
    carry, length = p["carry"], p["length"]
    start = operands[carry]
    axes = (m := propagator.moments(start)).natural()
    x = m.sequence(*axes)
    outer = {i: propagator.moments(v) for i, v in enumerate(operands) if isinstance(v, Node)}
    stacked = range(carry + 1, len(operands)) if length is not None else range(0)
    rows = {i: v.posterior if isinstance(v := operands[i], Weight) else v for i in stacked}

    def planned(start_base: Base, rows: dict[int, Any], steps: dict[Node, Step]) -> Sequence:
        """The output of the body, of the array that it carries and of one row of each stack."""
        shared = {name: getattr(propagator, name) for name in _SHARED}
        inner = Propagator(propagator.structure, **shared)
        inner.repeats.update(propagator.repeats)

        def argument(i: int, value: Any) -> Any:
            if i == carry:
                found = Moments(start_base, arrays.ordered(start.shape, *axes))
                own = frozenset(weights_of(start, []))
                return inner.given(found, start.dtype, own, start.weights - own)
            if isinstance(value, Node):
                known = outer[i]
                base = Base(known.base.shape, lambda: known.base.numbers[:2])
                return inner.given(Moments(base, known.places), value.dtype, value.weights)
            if i not in rows:
                return value
            if not isinstance(value, Weight):
                return rows[i]
            return dataclasses.replace(Weight.of(rows[i]), root=value.origin, rows=value.rows)

        arguments = [argument(i, value) for i, value in enumerate(operands)]
        (out,) = Recorder(inner.repeats).run(p["body"], p["consts"], arguments)
        found = inner.moments(out).sequence(*axes)
        steps.update(inner.steps)
        if length is None:
            propagator.pool, propagator.reading = inner.pool, inner.reading
        return found

    # Once in advance, so that what it has no rule for is known before anything is computed.
    planned(Base(x.shape, lambda: x.moments), jax.tree.map(lambda a: a[0], rows), propagator.steps)

    def body(mean: Array, cov: Any, rows: dict[int, Any]) -> tuple[Array, Any]:
        y = planned(Base(x.shape, lambda: (mean, _pooled_alike(propagator, cov))), rows, {})
        form: Any = jax.tree.structure(cov)
        if jax.tree.structure(y.cov) != form:
            raise errors.refuse("a loop that changes what is kept of a covariance", node.source, "")
        return jax.tree.map(lambda new, old: new.astype(old.dtype), y.moments, (mean, cov))

    def compute() -> tuple[Array, Any]:
        at = x.mean, _pooled_alike(propagator, x.cov)
        for known in outer.values():
            known.base.numbers  # noqa: B018 (before the loop, not in it)
        if length is None:
            options = {name: p["options"][name] for name in ("policy", "prevent_cse")}
            return jax.checkpoint(body, **options)(*at, {})

        def step(at: tuple[Array, Any], rows: dict[int, Any]) -> tuple[Any, None]:
            return body(*at, rows), None

        return jax.lax.scan(step, at, rows, length, unroll=p["options"]["unroll"])[0]

    if length is not None:
        propagator.note(node, "loop", "steps independent")
    return Moments(Base(x.shape, compute, None), arrays.ordered(node.shape, *axes))


def _pooled_alike(propagator: Propagator, cov: Any) -> Any:
    """The covariance with the propagator's own object as its pool, by which others recognise it."""
    pool = propagator.pool
    if pool is None or getattr(cov, "pool", pool) is pool or cov.pool.shape != pool.shape:
        return cov
    fields = {field.name: getattr(cov, field.name) for field in dataclasses.fields(cov)}
    return cov.unchecked(*{**fields, "pool": pool}.values())
