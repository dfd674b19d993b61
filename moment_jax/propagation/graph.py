"""The graph of a function's operations on random values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import Array

from moment_jax.posterior import Point
from moment_jax.propagation.arrays import Same
from moment_jax.propagation.weights import Weight, overlap

Value = Any  # an array, a `Weight`, or a `Node`
_count = itertools.count()


@dataclasses.dataclass(eq=False, repr=False)
class Node:
    """An operation with a random operand; its moments are computed on demand."""

    primitive: Any
    params: dict[str, Any]
    operands: tuple[Value, ...]
    shape: tuple[int, ...]
    dtype: Any
    source: Any
    output: int = 0  # index among the results
    index: int = dataclasses.field(default_factory=lambda: next(_count))
    weights: frozenset[Weight] = frozenset()  # on which it depends
    tied: bool = False  # whether an operand is a weight on which another depends
    apart: set[int] = dataclasses.field(default_factory=set)
    """Operands, by number, that are taken as independent of all else."""

    def __post_init__(self) -> None:
        found = [weights_in(x) for x in self.operands]
        self.weights = frozenset().union(*found)
        own = [isinstance(x, Weight) for x in self.operands]
        pairs = itertools.combinations(zip(found, own, strict=True), 2)
        self.tied = any((a or b) and overlap(x, y) for (x, a), (y, b) in pairs)

    @property
    def op(self) -> str:
        """Name of the primitive."""
        return self.primitive.name

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def nodes(self) -> list[Node]:
        """The operands that are nodes."""
        return [x for x in self.operands if isinstance(x, Node)]

    @property
    def origins(self) -> list[Node]:
        """The operands that are nodes and count for what it depends on."""
        return [x for x in self.counted if isinstance(x, Node)]

    @property
    def counted(self) -> list[Value]:
        """The operands that count for what it depends on."""
        return [x for i, x in enumerate(self.operands) if i not in self.apart]


def is_random(value: Value) -> bool:
    """Whether a value is a weight or a node."""
    return isinstance(value, Weight | Node)


def weights_in(value: Value) -> frozenset[Weight]:
    """The weights on which a value depends."""
    if isinstance(value, Node):
        return value.weights
    random = isinstance(value, Weight) and not isinstance(value.posterior, Point)
    return frozenset([value]) if random else frozenset()


def independent(*values: Value) -> bool:
    """Whether no weight is in two of the values."""
    return not any(overlap(a, b) for a, b in itertools.combinations(map(weights_in, values), 2))


def as_weight(value: Value) -> Weight | None:
    """A weight, a certain array as a `Point` weight, or None for a node."""
    if is_random(value):
        return value if isinstance(value, Weight) else None
    return Weight.of(Point(as_floating(value)))


def as_floating(value: Any) -> Array:
    """A certain array, in floating point."""
    array = jnp.asarray(value)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(float)


Repeats = dict[Same, set[int]]  # the axes along which an array is the same
BELIEF = SimpleNamespace(name="belief")  # the primitive of a weight used as a random array
GIVEN = SimpleNamespace(name="given")  # that of an array of known moments
LOOP = SimpleNamespace(name="loop")  # that of a scan over stacked weights, or of a checkpoint


def between(
    root: Node, starts: Iterable[Any], operands: Callable[[Node], list[Node]] = lambda n: n.nodes
) -> set[Node]:
    """The nodes that an array depends on, down to but without `starts`."""
    seen: set[Node] = set()
    stack, ends = [root], set(starts)
    while stack:
        node = stack.pop()
        if node in ends or node in seen:
            continue
        seen.add(node)
        stack.extend(operands(node))
    return seen
