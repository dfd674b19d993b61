"""Attention, recognised by what it computes: softmax of products of two projections, times a third."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.layers.params import AttentionParams, DenseParams
from moment_jax.layers.rules import split_heads
from moment_jax.layers.sublayers import attention_with_carry
from moment_jax.posterior import Factorized, OutputShared, Point
from moment_jax.propagation import arrays, primitives, regions
from moment_jax.propagation.arrays import Axes, Moments, Places
from moment_jax.propagation.dense import Projection, identity, projection, rotated
from moment_jax.propagation.errors import LINEARISE, refuse
from moment_jax.propagation.graph import Node, as_weight, weights_in
from moment_jax.propagation.joins import combined
from moment_jax.propagation.paths import Entries
from moment_jax.propagation.propagator import Propagator, pattern
from moment_jax.propagation.scores import Rows, Scores, product, read
from moment_jax.propagation.weights import Weight, overlap, select


@dataclass(frozen=True, eq=False, repr=False)
class Core(arrays.View):
    """Attention without its output projection: (T, H K), with heads outermost in the features."""

    parts: tuple[Projection, ...]  # queries, keys and values
    columns: tuple[Places, ...]  # of these layers, (H, K)
    places: arrays.InHeads
    scores: Scores
    table: arrays.InWeights
    rows: Rows

    @property
    def width(self) -> int:
        """H K."""
        return self.columns[0].size

    def settings(self) -> dict[str, Any]:
        """What acts on the scores, for the rule."""
        scores, table, (_, counts, _, _) = self.scores, self.table, self.rows
        scale = product(scores.scale, table) if scores.scale else None
        if counts is not None:
            scale = jnp.asarray(counts, self.parts[0].x.dtype) * (1 if scale is None else scale)
        return {
            "scale": scale, "bias": scores.shift(table, self.rows), "cap": scores.cap,
            "noise": scores.noise(table, self._products),
        }  # fmt: skip

    def _products(self) -> Array:
        """Means of the products of queries and keys, (H, T, S)."""

        def heads(part: Projection, columns: Places) -> Array:
            y = part.layer.mean_output(part.x.mean)[:, columns.ravel()]
            return split_heads(y, len(columns), part.rotation)

        query, key = map(heads, self.parts[:2], self.columns[:2])
        return jnp.einsum("htk,hsk->hts", query, key)

    def gate(self) -> Array | None:
        """What multiplies the heads' outputs, (T, H K) or (1, H K)."""
        if not self.scores.gates:
            return None
        heads, width = self.columns[2].shape
        gate = jnp.asarray(product(self.scores.gates, self.table))[:, :, 0]
        return jnp.repeat(jnp.broadcast_to(gate, (heads, gate.shape[1])).T, width, axis=1)

    @property
    def shares_columns(self) -> bool:
        """Whether heads share queries, keys or values."""
        return any(len(np.unique(c)) < c.size for c in self.columns)


@pattern
def _attention(propagator: Propagator, node: Node) -> Moments | None:
    """Attention with its output projection if one follows: heads then keep their common noise."""
    if node.op != "dot_general":
        return None
    core = _core(propagator, node)
    if core is not None:
        kernel = Point(jnp.eye(core.width, dtype=core.parts[0].x.dtype))
        return _moments(propagator, node, core, DenseParams(kernel), core.places)
    for side in (0, 1):
        weight, value = as_weight(node.operands[1 - side]), node.operands[side]
        if weight is None or overlap(weights_in(value), [weight]):
            continue
        core = regions.through_views(value, partial(_core, propagator))
        if core is not None:
            return _projected(propagator, node, core, weight, side)
    return None


def _projected(
    propagator: Propagator, node: Node, core: Core, weight: Weight, side: int
) -> Moments | None:
    """Attention with this output projection, if it takes the features of each token in one order."""
    own, other = arrays.factors(node)[side], arrays.factors(node)[1 - side]
    if any(core.shape[i] > 1 for i in own.batch) or core.scores.gates:
        return None
    rows = arrays.as_rows(core.places, own.free, own.contracted)
    first = np.arange(len(rows))[:, None] * core.width
    if not np.array_equal(rows, first + rows[0]) or rows.shape[1] != core.width:
        return None
    of_features = arrays.as_rows(weight.places, other.contracted, other.free)
    kernel = select(weight.posterior, of_features[np.argsort(rows[0])])
    if kernel is None:
        return None
    places = arrays.in_product(node, side, np.arange(node.size))
    return _moments(propagator, node, core, DenseParams(kernel), places)


def _moments(
    propagator: Propagator, node: Node, core: Core, output: DenseParams, places: Places
) -> Moments | None:
    query, key, value = core.parts
    mask, x, source = core.rows.mask, query.x, key.x
    own, t = x.same(source), len(x.order)
    # Nothing is hidden by order where each looks at whom it is seen by, as in a batch of sequences.
    one_mask = primitives.is_known(mask) and mask.ndim == 2
    mutual = one_mask and np.array_equal(mask, np.transpose(mask))
    if own:
        propagator.find_pool(t, mask, mutual, x.dtype)
    layers: Any = [part.params(c) for part, c in zip(core.parts, core.columns, strict=True)]
    if None in layers:
        return None  # no family for these columns
    of_query, of_key, of_value = layers
    params = AttentionParams(of_query, of_key, of_value, output)
    from_memory = not own and not isinstance(query.source, Node)

    def compute() -> tuple[Any, ...]:
        cov = source.cov
        read = mutual or (own and propagator.reading and cov.pool is propagator.pool)
        seen = cov if read else cov.seen_by(mask, memory=not own)
        mean, cov, carried = attention_with_carry(
            x.mean, seen if own else x.cov, params, len(core.columns[0]), mask,
            memory=None if own else (source.mean, seen), turns=(query.rotation, key.rotation),
            **core.settings(),
        )  # fmt: skip
        if core.rows.lost is not None:
            mean = jnp.where(core.rows.lost.any(0), jnp.nan, mean)
        gate = core.gate()
        if gate is None:
            return mean, cov, (lambda cross: carried(None, cross)) if from_memory else carried

        def gated(*crosses: Any) -> Any:
            return carried(*([None, *crosses] if from_memory else crosses)).rescale(gate)

        return mean * gate, cov.rescale(gate), gated

    assumed = "input and weights independent"
    if not own and isinstance(query.source, Node):
        assumed += "; x and memory too"
        tables = [*_tables(query.source), *_tables(key.source)]
        both = [w for w in weights_in(query.source) if not _in(w, tables)]
        if overlap(both, weights_in(key.source)):
            assumed += ", though x has attended to it before"
        elif overlap(weights_in(query.source), weights_in(key.source)):
            assumed += ", though both are looked up in one table"
        for dense in (key.product, value.product):
            dense.apart |= {i for i, y in enumerate(dense.operands) if isinstance(y, Node)}
    for at, i in core.scores.apart:
        at.apart.add(i)
    if core.scores.apart:
        assumed += "; so is what is random in the scale or the bias of the scores"
    if propagator.structure.entrywise and core.shares_columns:
        assumed += "; heads too, though they share keys or values"
    if query.rotation is not None or key.rotation is not None:
        assumed += "; rotary positions turn means, and covariances as far as the structure can"
    propagator.note(node, "attention" if own else "cross_attention", assumed)
    shape = t, output.kernel.shape[1]
    return arrays.made(compute, shape, places, source if from_memory else x)


def _core(propagator: Propagator, node: Node) -> Core | None:
    """A product of attention weights and values, or None."""
    if node.op != "dot_general":
        return None
    for side in (0, 1):
        weights, values = node.operands[side], node.operands[1 - side]
        if not isinstance(weights, Node) or isinstance(values, Weight):
            continue
        scores = read(propagator, weights)
        if scores is None:
            continue
        # As layers of one array, or else as one array in which all three stand side by side.
        nodes = (*scores.product.operands, values)
        used = [w for n in nodes if isinstance(n, Node) for w in regions.weights_of(n, [])]
        if any(overlap(used, weights_in(at.operands[i])) for at, i in scores.apart):
            what = "attention with a random bias or factor, of weights that its inputs use"
            raise refuse(what, weights.source, f"Give it weights of its own, or {LINEARISE}.")
        parts = [projection(propagator, x) for x in nodes]
        layout, of_layers = None, False
        if None not in parts and _each_used_once(nodes, parts):
            layout = _layout(node, side, scores, parts)
        if layout is not None:  # heads may share columns where entries are independent anyway
            apart = propagator.structure.entrywise or not layout.shares_columns
            of_layers = apart and layout.parts[1].x.same(layout.parts[2].x)
        if not of_layers:
            axes = *arrays.factors(scores.product), arrays.factors(node)[1 - side]
            features = [(*a.batch, *a.contracted) for a in axes[:2]]
            features.append((*axes[2].batch, *axes[2].free))
            parts = [_as_it_is(propagator, *x) for x in zip(nodes, features, strict=True)]
            layout = _layout(node, side, scores, parts)
        if layout is None or layout.columns[2].shape[1] != layout.columns[0].shape[1]:
            return None
        if any(g.random or g.shown(layout.table).shape[2] > 1 for g in scores.gates):
            what = "attention with weights that are multiplied key by key, or by random numbers"
            raise refuse(what, weights.source, f"Add the logarithm to the scores, or {LINEARISE}.")
        core = _scaled(layout)
        return core if of_layers else _side_by_side(propagator, node, core)
    return None


def _scaled(core: Core) -> Core:
    """The scores' factor as one of the queries, where it is one number; the rule divides by sqrt(K)."""
    scale, root = core.scores.scale, core.columns[0].shape[1] ** 0.5
    if any(f.random or f.of.size > 1 for f in scale):
        whole = (*scale, Entries(np.full(1, root), np.zeros_like(core.scores.places)))
        return replace(core, scores=replace(core.scores, scale=whole))
    number = math.prod((f.number for f in scale), start=root)
    query, *others = core.parts
    same = primitives.is_known(number) and math.isclose(number, 1, rel_tol=core.scores.eps)
    parts = query if same else query.times(number), *others
    return replace(core, parts=parts, scores=replace(core.scores, scale=()))


def _as_it_is(propagator: Propagator, value: Any, features: Axes) -> Projection:
    """Any array as a layer of itself, rotated if it is; a certain one has these features."""
    itself = partial(identity, propagator, features=features)
    found = regions.through_views(value, lambda n: rotated(propagator, n, itself))
    return identity(propagator, value, features) if found is None else found


def _side_by_side(propagator: Propagator, node: Node, core: Core) -> Core:
    """Queries, keys and values as one array with all that they share, and layers that pick them."""
    inputs = [part.x for part in core.parts]
    queries, keys = len(inputs[0].order), len(inputs[1].order)
    count, ends = max(queries, keys), np.cumsum([x.shape[1] for x in inputs])
    placed = []
    for x, end in zip(inputs, ends, strict=True):
        t, width = x.shape
        order = np.full((count, ends[-1]), -1)
        order[:t, end - width : end] = x.order
        placed.append(x.base.at(order))
    base, _ = combined(propagator, node, placed)
    base.node, base.finish = node, propagator.finished
    whole = Moments(base, arrays.numbered(base.shape))
    layer = DenseParams(Point(jnp.eye(ends[-1], dtype=base.dtype)))
    both, scale = whole.sequence((0,), (1,)), core.parts[0].layer.kernel.mean[0, 0]  # of the scores
    parts = [replace(part, x=both, layer=layer) for part in core.parts]
    parts[0] = parts[0].times(scale)
    columns = tuple(c + start for c, start in zip(core.columns, (0, *ends[:-1]), strict=True))
    if queries != keys:  # further queries and keys, at which nobody looks
        beyond = (0, 0), (0, count - queries), (0, count - keys)
        core = replace(core, table=np.pad(core.table, beyond, constant_values=-1))
        for i, r in enumerate(part.rotation for part in parts):
            if r is not None:
                r = jnp.pad(r, ((0, count - len(r)), (0, 0), (0, 0)))
                parts[i] = replace(parts[i], rotation=r)
    return replace(core, parts=tuple(parts), columns=columns, rows=core.scores.seen(core.table))


def _each_used_once(nodes: tuple[Node, ...], parts: list[Any]) -> bool:
    """Whether queries, keys and values use no weight twice, nor one on which x depends."""
    before = [weights_in(part.source) for part in parts]
    starts = [part.source if isinstance(part.source, Node) else None for part in parts]
    ways = list(zip(nodes, ([start] for start in starts), strict=True))
    after = [regions.weights_of(*way) for way in ways]
    if any(n.tied for way in ways for n in regions.between(*way)):
        return False
    if any(overlap(a, b) for a in after for b in before):
        return False
    # The weights on which x depends other than through what it attended to before, or a table in which
    # it and the memory are looked up.
    query = [] if starts[0] is None else regions.weights_of(starts[0], [])
    tables = [w for start in starts if start is not None for w in _tables(start)]
    query = [w for w in query if not _in(w, tables)]
    for i, j in itertools.combinations(range(3), 2):
        a, b = parts[i], parts[j]
        width = a.layer.kernel.shape[1]
        if a.product is b.product:
            entrywise = isinstance(a.layer.kernel, Factorized | OutputShared | Point)
            if not entrywise or np.intersect1d(a.places % width, b.places % width).size:
                return False
        elif overlap(after[i], after[j]):
            return False
        if not a.x.same(b.x) and overlap(query if i == 0 else before[i], before[j]):
            return False
    return True


def _in(weight: Weight, tables: list[Weight]) -> bool:
    return any(weight.origin is table.origin for table in tables)


def _tables(node: Node) -> list[Weight]:
    """The tables from which an array looks up its rows, and that it uses for nothing else."""
    inside = regions.between(node, [])
    used = [(x, n.op) for n in inside for x in n.operands if isinstance(x, Weight)]
    others = [w for w, op in used if op != "gather"]
    return [w for w, op in used if op == "gather" and not overlap([w], others)]


def _layout(node: Node, side: int, scores: Scores, parts: list[Any]) -> Core | None:
    """Attention whose output is `node`, with the weights on this side of the product.

    `parts` are the left and the right factor of the scores, and the values. For example, of two heads of
    three features, T = 5, by `w @ v` with w (2, 5, 5) and v (2, 5, 3), head 1 and query 4 are row 4 of
    batch 1. Its weight of key 2 lies at 1 * 25 + 4 * 5 + 2 = 47 in w, and so does its score in the
    product. There the left factor is at row 4 of batch 1, which `decoded` finds in token 4 and columns 3
    to 5 of the layer that makes queries; the right one in token 2 of the keys. So table[1, 4, 2] is 47,
    and the output of head 1 and query 4 lies at 4 * 6 + 3, the fourth entry of row 4 in (T, H K).
    """
    own, other = arrays.factors(node)[side], arrays.factors(node)[1 - side]
    # Places of the scores and of the weights, (batch, rows, keys) of the product, like all that follows.
    at = arrays.as_rows(scores.places, *own)
    entry = arrays.as_rows(arrays.numbered(scores.places.shape), *own)
    both = [p.decoded(*f) for p, f in zip(parts, arrays.factors(scores.product), strict=False)]
    batch, *rows = np.unravel_index(at, (*both[0][0].shape[:2], both[1][0].shape[1]))
    # The token and the columns of the left and of the right factor of each score.
    found = ((t[batch, i, 0], c[batch, i]) for (t, c), i in zip(both, rows, strict=True))
    tokens, columns = zip(*found, strict=True)
    left, right = tokens
    swapped = bool((left != left[..., :1]).any())
    if swapped or (left.shape[-1] == 1 and left.max() > right.max()):  # keys on the left
        tokens, columns, parts = tokens[::-1], columns[::-1], [parts[1], parts[0], parts[2]]
    query, key = tokens
    heads, head = np.unique(columns[0][..., 0], return_inverse=True)
    head = head.reshape(at.shape)
    # A batch of sequences is one sequence, in which each looks at its own tokens: -1 elsewhere.
    shape = len(heads), len(np.unique(query)), len(np.unique(key))
    full = shape[0] * shape[1] * at.shape[-1] == at.size and shape[2] % at.shape[-1] == 0
    if not full or key.max() >= shape[2] or query.max() >= shape[1]:
        return None
    table = np.full(shape, -1)
    table[head, query, key] = arrays.numbered(at.shape)
    # Every weight has a place; rows are those of a query, and columns those of a key and a value.
    value_tokens, value_columns = parts[2].decoded(other.batch, other.contracted, other.free)
    by_row = (head == head[..., :1]).all() and (query == query[..., :1]).all()
    by_key = (key == key[:, :1]).all() and (value_tokens == key[:, 0][:, :, None]).all()
    first = table[:, 0, 0]  # an entry of each head
    if (table >= 0).sum() != at.size or not (by_row and by_key) or (first < 0).any():
        return None
    b, i, j = np.unravel_index(first, at.shape)
    own_columns = value_columns[b, j]
    if (value_columns != own_columns[head[:, 0, 0]][:, None]).any():
        return None
    width = own_columns.shape[-1]
    output = (query[..., 0] * len(heads) + head[..., 0])[..., None] * width + np.arange(width)
    output = arrays.in_product(node, side, output)
    table = np.where(table < 0, -1, entry.ravel()[table])
    if not scores.whole_rows(table):
        return None
    used = (*(c[b, i, j] for c in columns), own_columns)
    return Core(tuple(parts), used, output, scores, table, scores.seen(table))
