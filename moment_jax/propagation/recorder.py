"""Records the operations on random values; everything else is computed at once."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core

from moment_jax.propagation import blocks, primitives
from moment_jax.propagation.arrays import Same
from moment_jax.propagation.errors import LINEARISE, refuse
from moment_jax.propagation.graph import (
    BELIEF,
    LOOP,
    Node,
    Repeats,
    Value,
    between,
    independent,
    is_random,
    weights_in,
)
from moment_jax.propagation.weights import Weight, affine, overlap, stack

_DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}
_WITH_WEIGHTS = {"add", "add_any", "sub", "mul", "div"}


class Recorder:
    """Builds the graph of a jaxpr."""

    def __init__(self, repeats: Repeats, *, unrolls: bool = False) -> None:
        self.repeats = repeats
        self.unrolls = unrolls  # whether loops are unrolled
        self.drawn: set[Same] = set()  # random numbers that the function drew
        self.beliefs: dict[Weight, Node] = {}
        self.formed: dict[Weight, tuple[Any, Any]] = {}  # multiples of weights, and from what
        self.rows: dict[tuple[Weight, int], Weight] = {}  # of stacks
        self.found: dict[Any, Any] = {}  # results of each operation, which is not repeated
        self.calls: tuple[Any, ...] = ()  # sources of the enclosing calls, innermost first

    def run(self, jaxpr: Any, consts: Any, args: Any) -> list[Value]:
        """Outputs of an open jaxpr."""
        env: dict[Any, Value] = {}

        def read(atom: Any) -> Value:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        rows = [] if self.unrolls else blocks.blocks_of(jaxpr)
        starts = {row.first + i * row.period: (row, i) for row in rows for i in range(row.count)}
        done = 0
        for i, eqn in enumerate(jaxpr.eqns):
            if i < done:
                continue
            if i in starts:
                row, first = starts[i]
                node, count = self._blocks(row, first, jaxpr.eqns, read)
                if node is not None:
                    env[row.carried[first + count]] = node
                    done = i + count * row.period
                    continue
            results = self.equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, operands: list[Value]) -> list[Value]:
        """Results of an equation."""
        name = eqn.primitive.name
        if not any(map(is_random, operands)) and name not in ("jit", "pjit"):
            views = name == "broadcast_in_dim"  # of one mask, however often it is used
            again = (Same(operands[0]), str(eqn.params)) if views else None
            if again in self.found:
                return list(self.found[again])
            results = primitives.evaluate(eqn.primitive, operands, eqn.params)
            if views:
                self.found[again] = results
            self._note_repeats(eqn, operands, results[0])
            if name in _DRAWS or any(Same(x) in self.drawn for x in operands):
                self.drawn.update(map(Same, results))
            return results
        if name == "scan":
            return self._unrolled(eqn, operands)
        if name == "select_n":
            apart = self._slope_apart(eqn, operands)
            if apart is not None:
                return apart
        if name == "stack":
            return [self._stacked(operands, eqn, eqn.params["axis"])]
        by_patches = primitives.as_product(eqn)
        if by_patches is not None:
            return self._applied(by_patches, operands, eqn)
        if name in ("remat2", "checkpoint") and not self.unrolls:
            found = self._recomputed(eqn, operands)
            return found or self._entered(eqn, eqn.params["jaxpr"], operands)
        for inner in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if inner in eqn.params:
                return self._entered(eqn, eqn.params[inner], operands)
        if any(Same(x) in self.drawn for x in operands):
            raise refuse(
                f"`{name}` of a random value with random numbers drawn in the function (dropout?)",
                self.source(eqn),
                "Evaluate the model in inference mode: model.eval(), or deterministic=True.",
            )
        key = name, str(eqn.params), *map(_identity, operands)
        if key not in self.found:
            results = self._weights(eqn, operands) or self._nodes(eqn, operands)
            self.found[key] = results
        return list(self.found[key])

    def _note_repeats(self, eqn: Any, operands: list[Value], array: Any) -> None:
        """Remember along which axes a certain array repeats itself, such as a padding mask."""
        name, shape = eqn.primitive.name, np.shape(array)
        known = [
            {i for i, n in enumerate(np.shape(x)) if n == 1} | self.repeats.get(Same(x), set())
            for x in operands
        ]
        axes = set(range(len(shape)))
        if name == "broadcast_in_dim":
            placed = enumerate(eqn.params["broadcast_dimensions"])
            axes -= {place for i, place in placed if i not in known[0]}
        elif name == "transpose":
            axes = {i for i, old in enumerate(eqn.params["permutation"]) if old in known[0]}
        elif name in primitives.ELEMENTWISE:
            axes = axes.intersection(
                *(k for k, x in zip(known, operands, strict=True) if np.ndim(x))
            )
        else:
            return
        self.repeats[Same(array)] = axes

    def source(self, eqn: Any) -> tuple[Any, ...]:
        """Source of an equation, and of the calls around it."""
        return (eqn.source_info, *self.calls)

    def _entered(self, eqn: Any, jaxpr: Any, operands: list[Value]) -> list[Value]:
        before, self.calls = self.calls, self.source(eqn)
        try:
            return self.run(_opened(jaxpr), getattr(jaxpr, "consts", ()), operands)
        finally:
            self.calls = before

    def _weights(self, eqn: Any, operands: list[Value]) -> list[Value] | None:
        """The results as views or multiples of a single belief, or None."""
        weight, *others = (x for x in operands if is_random(x))
        if others or not isinstance(weight, Weight):
            return None
        name = eqn.primitive.name
        seen = primitives.moved(eqn, weight.places, operands[1:]) if weight is operands[0] else None
        lookup = name == "gather" and (weight.ndim == 2 or any((p < 0).any() for p in seen or ()))
        if seen is not None and not lookup:  # no embedding
            return [dataclasses.replace(weight, places=places) for places in seen]
        changed = affine(name, operands)
        if changed is None:
            return None
        if changed is not weight:
            self.formed[changed] = eqn, operands
        return [changed]

    def _nodes(self, eqn: Any, operands: list[Value]) -> list[Value]:
        if all(v.aval.size == 0 for v in eqn.outvars):  # no entries
            return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        source = self.source(eqn)
        name = eqn.primitive.name
        beside = name in _WITH_WEIGHTS and any(isinstance(x, Node) for x in operands)
        beside = beside and independent(*operands)  # else both are functions of one random array
        dense = name == "dot_general" and (
            independent(*operands) or not all(isinstance(x, Weight) for x in operands)
        )
        if dense and all(isinstance(x, Weight) for x in operands):
            operands = [self._belief(operands[0], source), operands[1]]
        if not (beside or dense or name in ("gather", "concatenate")):
            operands = [self._belief(x, source) for x in operands]
        operands = _split_gains(eqn, operands, source)
        return [
            Node(eqn.primitive, eqn.params, tuple(operands), v.aval.shape, v.aval.dtype, source, i)
            for i, v in enumerate(eqn.outvars)
        ]

    def _belief(self, x: Value, source: Any) -> Value:
        """A weight as a node; other values as they are."""
        if not isinstance(x, Weight):
            return x
        if x not in self.beliefs:
            node = Node(BELIEF, {}, (x,), x.shape, x.dtype, source)
            if x in self.formed:  # a function of the weight, so that it stays one weight
                eqn, operands = self.formed[x]
                whole = tuple(self._belief(y, source) for y in operands)
                node = Node(eqn.primitive, eqn.params, whole, x.shape, x.dtype, source)
            self.beliefs[x] = node
        return self.beliefs[x]

    def _unrolled(self, eqn: Any, operands: list[Value]) -> list[Value]:
        p, body = eqn.params, eqn.params["jaxpr"]
        # Scanned inputs and stacked outputs have one axis more outside than in the body.
        inner = _opened(body)
        over, carry = (
            sum(v.aval.ndim == w.aval.ndim for v, w in zip(outside, inside, strict=True))
            for outside, inside in ((eqn.invars, inner.invars), (eqn.outvars, inner.outvars))
        )
        fixed = over - carry
        consts, state, over = operands[:fixed], operands[fixed:][:carry], operands[fixed + carry :]
        if not carry and not any(isinstance(x, Weight) for x in over):
            axes = (None,) * fixed + (0,) * len(over)
            return self._applied(jax.vmap(core.jaxpr_as_fun(body), axes), operands, eqn)
        steps = range(p["length"])
        if carry == len(eqn.outvars) == 1 and not p["reverse"]:
            found = self._looped(eqn, consts, state, over)
            if found is not None:
                return [found]
        stacked: dict[int, list[Value]] = {}
        for i in reversed(steps) if p["reverse"] else steps:
            before = frozenset().union(*map(weights_in, state))
            out = self._entered(eqn, body, [*consts, *state, *(self._row(x, i, eqn) for x in over)])
            state, stacked[i] = out[:carry], out[carry:]
            used = frozenset().union(*map(weights_in, state)) - before
            weights = [x for x in consts if isinstance(x, Weight)]  # of other arrays, rules judge
            if len(steps) > 1 and any(overlap(used, weights_in(x)) for x in weights):
                raise refuse(
                    "a loop that uses the same random weights at every step (a recurrent network?)",
                    self.source(eqn),
                    f"Loop over stacked weights, a row for each step, or {LINEARISE}.",
                )
        ys = [[stacked[i][j] for i in steps] for j in range(len(eqn.outvars) - carry)]
        return [*state, *(self._stacked(rows, eqn) for rows in ys)]

    def _slope_apart(self, eqn: Any, operands: list[Value]) -> list[Value] | None:
        """PReLU's where(x > 0, x, a x) as where(x > 0, x, 0) + a where(x > 0, 0, x), else None."""
        condition, *cases = operands
        for i, case in enumerate(cases):
            if not isinstance(condition, Node) or not isinstance(case, Node) or case.op != "mul":
                continue
            for x, slope in (case.operands, case.operands[::-1]):
                known = isinstance(slope, Node) or primitives.uniform(slope) is not None
                if not isinstance(x, Node) or known or x.shape != case.shape:
                    continue

                def fn(condition: Array, other: Array, x: Array, slope: Array, i: int = i) -> Array:
                    zero = jnp.zeros_like(x)
                    cases = ((x, zero), (zero, other)) if i == 0 else ((zero, x), (other, zero))
                    of_x, rest = (jax.lax.select_n(condition, *case) for case in cases)
                    return of_x * slope + rest

                return self._applied(fn, [condition, cases[1 - i], x, slope], eqn)
        return None

    def _looped(self, eqn: Any, consts: Any, state: list[Value], over: Any) -> Node | None:
        """All steps of a scan as one loop, if that is possible."""
        if (
            self.unrolls
            or eqn.params["length"] < blocks.FEWEST
            or any(isinstance(x, Weight) for x in (*consts, *state))
            or any(isinstance(x, Node) or (isinstance(x, Weight) and not x.is_stack) for x in over)
        ):
            return None
        closed = eqn.params["jaxpr"]
        options = {name: eqn.params[name] for name in ("length", "unroll")}
        operands = [*consts, *state, *over]
        return self._loop(_opened(closed), closed.consts, operands, len(consts), options, eqn)

    def _blocks(
        self, row: blocks.Blocks, first: int, eqns: list[Any], read: Callable[[Any], Value]
    ) -> tuple[Node | None, int]:
        """A loop over equal blocks from this one on whose beliefs are alike, and how many these are."""
        values = [[read(v) for v in column[first:]] for column in row.outside]
        kinds = [tuple(map(_kind, block)) for block in zip(*values, strict=True)]
        alike = list(itertools.takewhile(lambda kind: kind == kinds[0], kinds))
        start, count = read(row.carried[first]), len(alike)
        columns = list(zip(row.outside, (column[:count] for column in values), strict=True))
        shared = [(v[0], x[0]) for v, x in columns if _one(x)]
        own = [(v[0], x) for v, x in columns if not _one(x)]
        weights = [w for _, x in own for w in x if isinstance(w, Weight)]
        others = [start, *(x for _, x in shared)]
        if (
            count < blocks.FEWEST
            or not weights
            or len({id(w.origin) for w in weights}) < len(weights)
            or not all(w.is_whole for w in weights)
            or any(isinstance(x, Weight) for x in others)
            or any(isinstance(x[0], Node) for _, x in own)
            or overlap(weights, frozenset().union(*map(weights_in, others)))
        ):
            return None, 0
        invars = [*(v for v, _ in shared), row.carried[0], *(v for v, _ in own)]
        first_block = eqns[row.first : row.first + row.period]
        body = blocks.Body(invars, first_block, [row.carried[1]])
        operands = [*(x for _, x in shared), start, *(stack(x) for _, x in own)]
        options = {"length": count, "unroll": 1}
        node = self._loop(body, (), operands, len(shared), options, eqns[row.first])
        node.weights |= frozenset(weights)
        return node, count

    def _recomputed(self, eqn: Any, operands: list[Value]) -> list[Value] | None:
        """What `jax.checkpoint` computes of one random array, as one node."""
        nodes = [i for i, x in enumerate(operands) if isinstance(x, Node)]
        same = [i for i in nodes if operands[i].shape == eqn.outvars[0].aval.shape]
        if len(eqn.outvars) != 1 or not same:
            return None
        jaxpr = eqn.params["jaxpr"]
        options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
        consts = getattr(jaxpr, "consts", ())
        return [self._loop(_opened(jaxpr), consts, operands, same[0], options, eqn)]

    def _loop(
        self, body: Any, consts: Any, operands: list[Value], carry: int, options: dict[str, Any],
        eqn: Any,
    ) -> Node:  # fmt: skip
        """A node for the body of a loop or of a checkpoint.

        It carries the operand of this index; those after it are the stacks of a loop.
        """
        out = body.outvars[0].aval
        params = {"body": body, "consts": consts, "carry": carry, "options": options}
        return Node(LOOP, params, tuple(operands), out.shape, out.dtype, self.source(eqn))

    def _stacked(self, rows: list[Value], eqn: Any, axis: int = 0) -> Value:
        """Arrays stacked along a new axis."""
        rows = [self._belief(x, self.source(eqn)) for x in rows]

        def stack(*parts: Array) -> Array:
            return jnp.concatenate([jnp.expand_dims(x, axis) for x in parts], axis)

        return self._applied(stack, rows, eqn)[0]

    def _applied(self, fn: Any, operands: list[Value], eqn: Any) -> list[Value]:
        """The results of a function that stands for a part of an equation."""
        shapes = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in operands]
        return self._entered(eqn, jax.make_jaxpr(fn)(*shapes), operands)

    def _row(self, x: Value, i: int, eqn: Any) -> Value:
        if not isinstance(x, Weight):
            return self._applied(lambda a: a[i], [x], eqn)[0]
        # One belief for each row, however often the stack is scanned over.
        if (x, i) not in self.rows:
            self.rows[x, i] = x.row(i)
        return self.rows[x, i]


def _kind(x: Value) -> Any:
    """What values must have in common to be rows of one stack."""
    if isinstance(x, Weight):
        leaves, form = jax.tree.flatten(x.posterior)
        return x.shape, form, *((leaf.shape, leaf.dtype) for leaf in leaves)
    return Node if isinstance(x, Node) else np.shape(x), x.dtype


def _one(values: Sequence[Value]) -> bool:
    """Whether all are the same value, or equal numbers."""
    first, *others = values
    known = all(not is_random(x) and primitives.is_known(x) for x in values)
    return all(x is first for x in others) or (
        known and all(np.array_equal(x, first) for x in others)
    )


def _identity(x: Value) -> Any:
    """The number, or the identity of an array."""
    known = primitives.is_known(x) and np.ndim(x) == 0
    return (np.asarray(x).dtype.name, np.asarray(x).item()) if known else Same(x)


def _opened(jaxpr: Any) -> Any:
    """The open jaxpr of an open or a closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _split_gains(eqn: Any, operands: list[Value], source: Any) -> list[Value]:
    """Rewrite a (c w) as (a c) w: Flax multiplies the gain w first, which hides the normalisation."""
    if eqn.primitive.name != "mul":
        return operands
    for a, b in (operands, operands[::-1]):
        if not (isinstance(a, Node) and isinstance(b, Node) and b.op == "mul"):
            continue
        if a.shape != eqn.outvars[0].aval.shape:
            continue
        for c, gain in (b.operands, b.operands[::-1]):
            found = (
                isinstance(c, Node)
                and not isinstance(gain, Node)
                and primitives.uniform(gain) is None
            )
            # A function of c w as a whole, such as silu, stays one.
            if found and not (overlap(a.weights, weights_in(gain)) or b in between(a, ())):
                inner = Node(eqn.primitive, eqn.params, (a, c), a.shape, a.dtype, source)
                return [inner, gain]
    return operands
