"""Equal blocks in a row, such as a list of layers, found among a program's operations."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

FEWEST = 3  # blocks that are worth a loop
SMALLEST = 20  # operations of a block that is worth one


class Body(NamedTuple):
    """The operations of a block, in the form of an open jaxpr."""

    invars: list[Any]
    eqns: list[Any]
    outvars: list[Any]
    constvars: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of the same operations, of which each maps the result of the one before.

    All variables are those of the program, which reads none of a block elsewhere but the last result.
    """

    first: int  # operation
    period: int  # operations of a block
    count: int  # of blocks
    carried: list[Any]  # what enters each block, and the last result
    outside: list[tuple[Any, ...]]  # what else the blocks read: a variable for each block


def blocks_of(jaxpr: Any) -> list[Blocks]:
    """All rows of equal blocks in an open jaxpr."""
    eqns = jaxpr.eqns
    if sum(map(_size, eqns)) < FEWEST * SMALLEST:
        return []
    numbers: dict[Any, int] = {}
    kinds = np.array([numbers.setdefault(_form(eqn), len(numbers)) for eqn in eqns], int)
    found: list[Blocks] = []
    free = np.ones(len(eqns), bool)
    links = _Links(jaxpr)
    for period in range(1, len(eqns) // FEWEST + 1):
        for start, stop in _runs(kinds[:-period] == kinds[period:], (FEWEST - 1) * period):
            size = sum(map(_size, eqns[start : start + period]))
            if size < SMALLEST or not free[start : stop + period].all():
                continue
            for first in range(start, min(start, stop - (FEWEST - 1) * period) + period):
                blocks = links.blocks(first, period, (stop - first) // period + 1)
                if blocks is not None:
                    found.append(blocks)
                    free[first : first + period * blocks.count] = False
                    break
    return found


def _runs(same: np.ndarray, least: int) -> Iterator[tuple[int, int]]:
    """Where runs of True of at least this length begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], same, [0]])))
    return ((a, b) for a, b in edges.reshape(-1, 2).tolist() if b - a >= least)


class _Links:
    """Which operation makes each variable, and which read it."""

    def __init__(self, jaxpr: Any) -> None:
        self.eqns = jaxpr.eqns
        self.maker = {v: (i, k) for i, e in enumerate(self.eqns) for k, v in enumerate(e.outvars)}
        self.readers: dict[Any, list[int]] = {}
        for i, atoms in enumerate([*(eqn.invars for eqn in self.eqns), jaxpr.outvars]):
            for v in filter(_is_variable, atoms):
                self.readers.setdefault(v, []).append(i)

    def made(self, v: Any) -> tuple[int, int]:
        """The operation that makes a variable, and which of its results this is."""
        return self.maker.get(v, (-1, 0))

    def blocks(self, first: int, period: int, count: int) -> Blocks | None:
        """So many blocks from this operation on, or None if more links them than what they carry."""
        starts = [first + r * period for r in range(count)]
        parts = [self.eqns[i : i + period] for i in starts]
        reads = [[v for eqn in part for v in eqn.invars if _is_variable(v)] for part in parts]
        before = [self.made(v) for v in reads[1]]
        crossing = {at for at in before if starts[0] <= at[0] < starts[1]}
        if len(crossing) != 1:
            return None
        ((i, k),) = crossing
        carried = [reads[0][before.index((i, k))]]
        carried += [part[i - first].outvars[k] for part in parts]
        if _kind(carried[0]) != _kind(carried[1]):
            return None
        columns: dict[Any, None] = {}
        for variables in zip(*reads, strict=True):
            places = {self._place(*each) for each in zip(variables, starts, carried, strict=False)}
            if len(places) > 1:
                return None
            if places == {None}:
                columns[variables] = None
        own = [column for column in columns if len(set(column)) > 1]
        for r, (start, part) in enumerate(zip(starts, parts, strict=True)):
            within = [column[r] for column in own]
            within += [v for eqn in part for v in eqn.outvars if v is not carried[r + 1]]
            if not all(self._reads_in(v, start, start + period) for v in within):
                return None
            if r + 1 < count and not self._reads_in(carried[r + 1], start, start + 2 * period):
                return None
        outside = all(self.made(v)[0] < first for column in columns for v in column)
        return Blocks(first, period, count, carried, list(columns)) if outside else None

    def _place(self, v: Any, start: int, carried: Any) -> Any:
        """Where a block that begins here has a variable from, in its own count; None from outside."""
        i, k = self.made(v)
        return "carried" if v is carried else (i - start, k) if i >= start else None

    def _reads_in(self, v: Any, start: int, stop: int) -> bool:
        """Whether only these operations read a variable."""
        return all(start <= i < stop for i in self.readers.get(v, ()))


def _is_variable(atom: Any) -> bool:
    return isinstance(atom, core.Var)


def _kind(v: Any) -> Any:
    return v.aval.shape, v.aval.dtype


def _size(eqn: Any) -> int:
    """Number of operations, those of inner jaxprs included."""
    inner = (getattr(x, "jaxpr", x) for x in eqn.params.values())
    return 1 + sum(_size(e) for jaxpr in inner for e in getattr(jaxpr, "eqns", ()))


def _form(eqn: Any, numbers: dict[Any, int] | None = None) -> Any:
    """What an operation does, hashable: without the names of variables, sources, or derivative rules."""

    def atom(v: Any) -> Any:
        if isinstance(v, core.Literal):
            return _number(v.val)
        number = None if numbers is None else numbers.setdefault(v, len(numbers))
        return v.aval.shape, v.aval.dtype, number

    derived = eqn.primitive.name.startswith("custom_")  # by rules that are not followed
    params = tuple(
        (name, _frozen(x))
        for name, x in sorted(eqn.params.items())
        if not derived or isinstance(x, core.Jaxpr | core.ClosedJaxpr)
    )
    return eqn.primitive.name, params, tuple(map(atom, eqn.invars)), tuple(map(atom, eqn.outvars))


def _number(x: Any) -> Any:
    """A literal, in all of its digits."""
    array = np.asarray(x)
    return array.dtype, array.shape, array.tobytes()


def _frozen(x: Any) -> Any:
    """A parameter of an operation, hashable; equal ones mean the same."""
    if isinstance(x, core.Jaxpr):
        numbers: dict[Any, int] = {}
        ends = [[numbers.setdefault(v, len(numbers)) for v in (*x.constvars, *x.invars)]]
        forms = tuple(_form(eqn, numbers) for eqn in x.eqns)
        results = tuple(
            _number(v.val) if isinstance(v, core.Literal) else numbers[v] for v in x.outvars
        )
        return len(ends[0]), forms, results
    if isinstance(x, core.ClosedJaxpr):
        return _frozen(x.jaxpr), tuple(map(id, x.consts))
    if isinstance(x, tuple | list):
        return tuple(map(_frozen, x))
    try:
        hash(x)
    except TypeError:  # arrays
        return id(x)
    return x
