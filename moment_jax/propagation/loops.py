"""Loops that are kept: a scan over stacked weights, and what `jax.checkpoint` recomputes."""

import dataclasses
from typing import Any

import jax
from jax import Array

from moment_jax.propagation.errors import refuse
from moment_jax.propagation.graph import Node, Recorder, given
from moment_jax.propagation.moments import Base, Moments, fresh
from moment_jax.propagation.propagator import Pooled, Propagator, rule
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
    stacked = range(carry + 1, len(operands)) if length is not None else range(0)
    rows = {
        i: v.posterior if isinstance(v := operands[i], Weight) else v for i in stacked
    }  # of weights their beliefs

    def body(mean: Array, cov: Any, rows: dict[int, Any]) -> tuple[Array, Any]:
        shared = {name: getattr(propagator, name) for name in _SHARED}
        inner = Propagator(propagator.structure, **shared)
        inner.repeats.update(propagator.repeats)

        def argument(i: int, value: Any) -> Any:
            if i == carry:
                found = fresh(mean, _pooled_alike(inner, cov), start.shape, *axes, ())
                own = frozenset(weights_of(start, []))
                return given(found, start.dtype, own, start.weights - own)
            if isinstance(value, Node):
                known = propagator.moments(value)
                known = Moments(Base(known.mean, known.cov, ()), known.places)
                return given(known, value.dtype, value.weights)
            if i not in rows:
                return value
            if not isinstance(value, Weight):
                return rows[i]
            return dataclasses.replace(Weight.of(rows[i]), root=value.origin, rows=value.rows)

        arguments = [argument(i, value) for i, value in enumerate(operands)]
        (out,) = Recorder(inner.repeats).run(p["body"], p["consts"], arguments)
        y = inner.moments(out).sequence(*axes)
        form: Any = jax.tree.structure(cov)
        if jax.tree.structure(y.cov) != form:
            raise refuse("a loop that changes what is kept of a covariance", node.source, "")
        return jax.tree.map(lambda new, old: new.astype(old.dtype), (y.mean, y.cov), (mean, cov))

    at = x.mean, _pooled_alike(propagator, x.cov)
    if length is not None:
        propagator.note(node, "loop", "steps independent")
        (mean, cov), _ = jax.lax.scan(
            lambda at, rows: (body(*at, rows), None),
            at,
            rows,
            length,
            unroll=p["options"]["unroll"],
        )
        return fresh(mean, cov, node.shape, *axes)
    options = {name: p["options"][name] for name in ("policy", "prevent_cse")}
    try:
        mean, cov = jax.checkpoint(body, **options)(*at, {})
    except Pooled:  # with an array of the checkpoint's own: say it again outside
        mean, cov = body(*at, {})
    return fresh(mean, cov, node.shape, *axes)


def _pooled_alike(propagator: Propagator, cov: Any) -> Any:
    """The covariance with the propagator's own object as its pool, by which others recognise it."""
    pool = propagator.pool
    if pool is None or getattr(cov, "pool", pool) is pool or cov.pool.shape != pool.shape:
        return cov
    fields = {field.name: getattr(cov, field.name) for field in dataclasses.fields(cov)}
    return cov.unchecked(*{**fields, "pool": pool}.values())
