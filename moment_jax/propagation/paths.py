"""Paths from an array down to another of which it is made, and what acts on each entry on the way."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from moment_jax.posterior import Point
from moment_jax.propagation import arrays, primitives, regions
from moment_jax.propagation.arrays import InWeights, Moments, Places
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.propagator import Propagator
from moment_jax.propagation.weights import Weight


@dataclass(frozen=True, eq=False, repr=False)
class Entries(arrays.View):
    """For each attention weight, the entry of an array that acts on its score."""

    of: Any  # a certain array (N,), or the `Moments` of a random one
    places: Places

    @property
    def random(self) -> bool:
        """Whether it is a random array."""
        return isinstance(self.of, Moments)

    @property
    def known(self) -> bool:
        """Whether it is known while tracing."""
        return primitives.is_known(self.of)

    @property
    def number(self) -> Any:
        """The one number that acts on all scores, traced or not."""
        return float(self.of[0]) if self.known else self.of[0]

    @property
    def mean(self) -> Any:
        """Mean of the array, (N,)."""
        return self.of.base.numbers[0].reshape(-1) if self.random else self.of

    def shown(self, table: InWeights) -> Places:
        """Which of them act on these weights, (H, T, S), with axes of length one where they repeat."""
        return merged(self.places.ravel()[np.maximum(table, 0)], (0, 1, 2))

    def over(self, table: InWeights) -> Any:
        """Their means, likewise."""
        return arrays.take(self.mean, self.shown(table))


Factors = tuple[Entries, ...]


class Choice(NamedTuple):
    """The scores where `kept` is `when`, and the sum of `other` elsewhere."""

    kept: Entries
    when: bool
    other: tuple[Factors, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Path:
    """A way down from an array: each entry is factors * an entry of `node` + shifts, or a choice."""

    propagator: Propagator
    node: Node
    places: Places  # of the first array's entries in this one, -1 where it has no part
    factors: Factors = ()
    shifts: tuple[Factors, ...] = ()  # each the product of its factors
    choices: tuple[Choice, ...] = ()  # from the outermost inwards
    apart: tuple[tuple[Node, int], ...] = ()  # random operands beside the path

    @classmethod
    def of(cls, propagator: Propagator, node: Node) -> "Path":
        """The array itself."""
        return cls(propagator, node, arrays.numbered(node.shape))

    def steps(self, leads: Callable[[Node], bool] = lambda n: True) -> list["Path"]:
        """The paths to the operands that lead on; none if the operation has no place on a path."""
        node, operands = self.node, self.node.operands
        if primitives.is_view(node):
            moved = primitives.moved(node, arrays.numbered(operands[0].shape), operands[1:])
            return [] if moved is None else [self._to(operands[0], moved[node.output])]
        inner = [x for x in node.nodes if leads(x)]
        if node.op == "concatenate" and len(inner) == len(operands):
            axis, paths = node.params["dimension"], []
            ends = np.cumsum([x.shape[axis] for x in inner])[:-1]
            parts = np.split(arrays.numbered(node.shape), ends, axis)
            for x, part in zip(inner, parts, strict=True):
                shown = np.full(node.size, -1)
                shown[part] = arrays.numbered(x.shape)
                paths.append(self._to(x, shown))
            return paths
        if any(x.shape != node.shape for x in inner):
            return []
        minus = self.certain(np.float32(-1))
        if len(inner) == 2 and node.op in ("add", "sub"):
            signed = (*self.factors, minus) if node.op == "sub" else self.factors
            return [replace(self, node=inner[0]), replace(self, node=inner[1], factors=signed)]
        if len(inner) != 1:
            return []
        below = replace(self, node=inner[0])
        first, others = operands[0] is inner[0], [x for x in operands if x is not inner[0]]
        if node.op == "neg":
            return [replace(below, factors=(*self.factors, minus))]
        if node.op == "select_n" and not is_random(operands[0]) and len(operands) == 3:
            other = self.entries(others[1])
            if other is None:
                return []
            instead = (*self.shifts, (*self.factors, other))
            choice = Choice(self.certain(others[0]), operands[2] is inner[0], instead)
            return [replace(below, choices=(*self.choices, choice))]
        if node.op not in ("mul", "div", "add", "add_any", "sub") or len(others) != 1:
            return []
        other = self.entries(others[0])
        if other is None or (node.op == "div" and (not first or other.random)):
            return []
        if other.random:
            below = replace(below, apart=(*self.apart, (node, int(first))))
        if node.op in ("mul", "div"):
            other = replace(other, of=1 / other.of) if node.op == "div" else other
            return [replace(below, factors=(*self.factors, other))]
        turned = (minus,) if node.op == "sub" else ()
        shift = *self.factors, other, *(turned if first else ())
        factors = *self.factors, *(() if first else turned)
        return [replace(below, shifts=(*self.shifts, shift), factors=factors)]

    def _to(self, node: Node, shown: Places) -> "Path":
        """The path to another array, of which this one shows these entries."""
        return replace(self, node=node, places=np.append(shown.ravel(), -1)[self.places])

    def certain(self, x: Any) -> Entries:
        """The entries of a certain array, or of a number."""
        array, index = self.propagator.entries(x, self.node.shape)
        return Entries(array, index.ravel()[self.places])

    def entries(self, x: Any) -> Entries | None:
        """The entries of a certain array, or of a random one made of weights alone; else None."""
        if isinstance(x, Weight) and isinstance(x.posterior, Point):
            x = arrays.take(x.posterior.mean, x.places)
        if not is_random(x):
            return self.certain(x)
        inside = regions.between(x, []) if isinstance(x, Node) else ()
        if any(is_product(n) or n.op in ("given", "loop") for n in inside):
            return None
        inner, places = regions.viewed(x)
        inner = inner.operands[0] if isinstance(inner, Node) and inner.op == "belief" else inner
        if isinstance(inner, Weight):
            shown = np.append(inner.places, -1)[places]
            x = replace(inner, places=shown) if (shown >= 0).all() else x
        m = self.propagator.moments(x)
        return Entries(m, np.broadcast_to(m.places, self.node.shape).ravel()[self.places])


def merged(array: np.ndarray, axes: tuple[int, ...] = (0, 1)) -> np.ndarray:
    """The array with these of its axes, (H, T, S), of length one where all along them are alike."""
    for axis in axes:
        first = array.take([0], axis)
        array = first if (array == first).all() else array
    return array


def is_product(node: Node) -> bool:
    """Whether this is a product of random arrays, or of one and a certain array."""
    return node.op == "dot_general" and not any(isinstance(x, Weight) for x in node.operands)
