"""From a product of queries and keys to the weights of attention, read operation by operation.

From the weights down to the scores z, a product of two random arrays, lie

    weights = gate * softmax(where(kept, cap(scale * z) + shift, other)).

All but z is certain, known while tracing or not, and has any shape that broadcasts; a factor of the
scale or of a shift may be a random array of weights alone, such as a table of relative positions. What
does not read like this raises: nothing is guessed.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.expectations import ElementwiseMoments
from moment_jax.expectations.activations import Formula
from moment_jax.expectations.quadrature import at
from moment_jax.layers.rules import ScoreNoise
from moment_jax.propagation import arrays, primitives, regions
from moment_jax.propagation.arrays import InWeights, Places
from moment_jax.propagation.elementwise import recognised
from moment_jax.propagation.errors import LINEARISE, refuse
from moment_jax.propagation.graph import Node, between
from moment_jax.propagation.paths import Choice, Entries, Factors, Path, is_product, merged
from moment_jax.propagation.propagator import Propagator

UNSEEN = 64.0
"""A key that is lower than the row's highest by more than this has no weight, exp(-64)."""


class Rows(NamedTuple):
    """What the rows of the scores' softmax see, (H, T, S) or with axes of length one; or None."""

    mask: Any = None  # which keys
    counts: Any = None  # where the scores count: elsewhere the weights are those of the shift alone
    shift: Any = None  # that is certain
    lost: Any = None  # rows without a defined weight


@dataclass(frozen=True, eq=False, repr=False)
class Scores:
    """Attention weights as a function of the product that has their scores."""

    product: Node
    places: arrays.InScores
    rows: Places  # the row of the softmax in which each weight is
    length: int  # of these rows
    eps: float  # of the scores' precision
    gates: Factors
    scale: Factors
    cap: Formula | None
    shifts: tuple[Factors, ...]  # each the product of its factors
    choices: tuple[Choice, ...]  # from the outermost inwards
    apart: tuple[tuple[Node, int], ...]  # operands that are random shifts and factors

    def whole_rows(self, table: InWeights) -> bool:
        """Whether each row of the table (H, T, S) holds one whole row of the softmax."""
        row = self.rows.ravel()[table]
        first = row.max(2, where=table >= 0, initial=0)
        same = ((row == first[:, :, None]) | (table < 0)).all()
        return bool(same and ((table >= 0).sum(2) == self.length).all())

    def seen(self, table: InWeights) -> Rows:
        """What the rows see, for the weights in this table (H, T, S); those at -1 are none."""
        certain = [shift for shift in self.shifts if not any(f.random for f in shift)]
        there = table >= 0
        there |= ~there.any(2, keepdims=True) & there.any(1, keepdims=True)  # rows of no weights
        there = np.ones((1, 1, 1), bool) if there.all() else there
        if not certain and not self.choices:
            return Rows(None if there.all() else _mask(merged(there)))
        used = [*certain, *(shift for choice in self.choices for shift in choice.other)]
        acting = [*(f for shift in used for f in shift), *(c.kept for c in self.choices)]
        known = all(f.known for f in acting)
        xp: Any = np if known else jnp
        base, kept = _total(certain, table), np.ones((1, 1, 1), bool)
        for choice in reversed(self.choices):
            on = choice.kept.over(table) == choice.when
            base, kept = xp.where(on, base, _total(choice.other, table)), kept & on
        base = base if there.all() else xp.where(there, base, -np.inf)
        base = xp.broadcast_to(base, (*base.shape[:2], table.shape[2]))
        top = base.max(-1, keepdims=True)
        lost = top == -np.inf
        base = base - xp.where(lost, 0, top)
        mask = (base > -UNSEEN) | (lost & there)
        # No score counts where none is kept, nor beside a number so large that it rounds all away.
        counts = (kept & mask).any(-1, keepdims=True) & (top * self.eps > -1)
        hides = not certain and all(_hides(choice.other) for choice in self.choices)
        counts = counts if hides else counts & (kept | ~mask)
        shift = None if hides else xp.where(mask, base, 0)
        if not known:
            return Rows(_mask(mask), counts, shift, lost)
        return Rows(
            None if mask.all() else _mask(merged(mask)),
            None if counts.all() else merged(counts),
            None if shift is None or not shift.any() else merged(shift),
            lost if lost.any() else None,
        )

    def noise(self, table: InWeights, scores: Callable[[], Any]) -> tuple[ScoreNoise, ...]:
        """The random parts; `scores` are the means of the product, for what is random in the scale."""
        found = []
        for factors in (*self.shifts, self.scale):
            for x in (x for x in factors if x.random):
                factor = product([y for y in factors if y is not x], table)
                factor = factor * scores() if factors is self.scale else factor
                places = x.places.ravel()[np.maximum(table, 0)]
                variance = x.of.base.numbers[1].variance().reshape(-1)
                found.append(ScoreNoise(variance, places, factor))
        return tuple(found)

    def shift(self, table: InWeights, rows: Rows) -> Any:
        """The mean of what is added to the scores, or None."""
        random = [shift for shift in self.shifts if any(f.random for f in shift)]
        if not random:
            return rows.shift
        mean = _total(random, table)
        return mean if rows.shift is None else rows.shift + mean


def product(factors: Iterable[Entries], table: InWeights) -> Any:
    """The product of the means, (H, T, S) or with axes of length one."""
    return math.prod((f.over(table) for f in factors), start=np.ones((1, 1, 1), np.float32))


def _total(shifts: Iterable[Factors], table: InWeights) -> Any:
    return sum((product(s, table) for s in shifts), start=np.zeros((1, 1, 1), np.float32))


def _mask(array: Any) -> Any:
    """(T, S) or (1, S) if it is the same for all heads."""
    return array[0] if len(array) == 1 else array


def _hides(other: tuple[Factors, ...]) -> bool:
    """Whether a key with this number in place of a score is hidden beside any score."""
    factors = [f for shift in other for f in shift]
    single = len(other) == 1 and all(f.known and f.of.size == 1 for f in factors)
    return single and math.prod(f.number for f in factors) < -1e4


def read(propagator: Propagator, weights: Node) -> Scores | None:
    """The weights of attention as a function of its scores; None if they are not made of a product.

    Raises:
      PropagationError: if they are, but not by the formula above; names the operation.
    """
    before = _products(weights)
    if not before:
        return None
    found = _read(propagator, weights)
    if isinstance(found, Scores):
        return found
    if any(len(n.nodes) == 2 for n in before):
        node, what = found
        fix = "Attention is softmax(where(mask, scale * q k^T + bias, number)), also with a smooth cap"
        raise refuse(f"attention with {what}", node.source, f"{fix}. Write it so, or {LINEARISE}.")
    return None  # a function of a layer with a known kernel, perhaps


def _read(propagator: Propagator, weights: Node) -> Scores | tuple[Node, str]:
    """`read`; or the operation that does not fit, and why."""
    path = Path.of(propagator, weights)
    while (softmax := _softmax(path.node)) is None:
        steps = path.steps(_leads)
        if len(steps) != 1 or steps[0].shifts or steps[0].choices:
            return path.node, "weights that are no softmax of its scores"
        (path,) = steps
    gates, (argument, axis) = path.factors, softmax
    rows = arrays.numbered(argument.shape).take([0], axis)
    rows = np.broadcast_to(rows, argument.shape).ravel()[path.places]
    path = _down(replace(path, node=argument, factors=()))
    below, cap = path, None
    if not is_product(path.node):
        found = _cap(path)
        if isinstance(found, str):
            return path.node, found
        path, below, cap = found
        below = _down(below)
        fits = not (below.shifts or below.choices or any(f.random for f in below.factors))
        if not fits or not is_product(below.node):
            return below.node, f"`{below.node.op}` below the cap of its scores"
    if (below.places < 0).any():
        return below.node, "weights of which some have no score"
    others = [f for choice in path.choices for shift in choice.other for f in shift]
    seen = not all(_hides(choice.other) for choice in path.choices)
    if any(f.random for f in [*others, *(f for s in path.shifts for f in s if seen)]):
        what = "a random bias where a number that may be seen stands in the place of scores"
        return weights, what
    eps = float(jnp.finfo(argument.dtype).eps)
    return Scores(
        below.node, below.places, rows, argument.shape[axis], eps, gates, below.factors, cap,
        path.shifts, path.choices, (*path.apart, *below.apart),
    )  # fmt: skip


def _leads(node: Node) -> bool:
    return bool(_products(node, through_exp=False))


def _down(path: Path) -> Path:
    """All steps to the product that have a place in the formula."""
    while not is_product(path.node) and len(below := path.steps(_leads)) == 1:
        (path,) = below
    return path


def _softmax(node: Node) -> tuple[Node, int] | None:
    """The argument and the axis of a softmax, exp(x - shift) / sum(exp(x - shift)); else None."""
    node = _same(node)
    if node.op != "div" or len(node.nodes) != 2:
        return None
    over, total = _same(node.nodes[0]), _same(node.nodes[1], primitives.VIEWS)
    if over.op != "exp" or total.op != "reduce_sum" or len(total.params["axes"]) != 1:
        return None
    (axis,) = total.params["axes"]
    same = _same(total.nodes[0]) is over
    return (_without_shift(_same(over.nodes[0]), axis), axis) if same else None


def _same(node: Node, operations: set[str] = primitives.UNMOVED) -> Node:
    """The array in its first precision and place."""
    while node.op in operations and primitives.is_view(node) and isinstance(node.operands[0], Node):
        node = node.operands[0]
    return node


def _without_shift(node: Node, axis: int) -> Node:
    """The array without what is subtracted from whole rows, such as their maximum."""
    while node.op == "sub" and len(node.nodes) == 2:
        _, places = regions.viewed(node.nodes[1])
        places = np.broadcast_to(places, node.shape)
        if (places != places.take([0], axis)).any():
            break
        node = _same(node.nodes[0])
    return node


def _cap(path: Path) -> tuple[Path, Path, Formula] | str:
    """The path, that below a function of each score, and this function's moments; or what is odd."""
    found = regions.univariate(path.node)
    if found is None or not _products(found.source, through_exp=False):
        return f"`{path.node.op}` between its scores and its weights"
    name, transform, _ = recognised(found, path.node)
    if name in ("steps", "linear"):
        return f"`{path.node.op}`, by which its scores jump, before its weights"
    if any(f.random or f.of.size > 1 for f in path.factors):
        return f"`{path.node.op}` of its scores, scaled by more than one number"
    factor, at_zero = math.prod(f.number for f in path.factors), float(at(found.fn, np.zeros(1))[0])
    if at_zero:  # beside other numbers it counts
        shift = *path.factors, path.certain(np.float32(at_zero))
        path = replace(path, shifts=(*path.shifts, shift))

    def scaled(mean: Array, variance: Array) -> ElementwiseMoments:
        of = transform(mean, variance)
        out, by_slope = factor * (of.mean - at_zero), factor * of.gain
        return ElementwiseMoments(out, factor**2 * of.variance, by_slope, factor * of.second)

    return path, Path(path.propagator, found.source, path.places), scaled


def _products(node: Node, *, through_exp: bool = True) -> list[Node]:
    """The products of which an array is made row by row; with an exponential somewhere above."""
    seen = between(node, [], lambda n: n.nodes if n.op in regions.BY_ROW else [])
    found = [n for n in seen if is_product(n)]
    return found if not through_exp or any(n.op == "exp" for n in seen) else []
