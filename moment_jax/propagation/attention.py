"""Attention, recognised by what it computes: softmax of products of two projections, times a third."""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.covariance.token_gram import pool_seen
from moment_jax.layers.attention import attention_with_carry
from moment_jax.layers.dense import dense
from moment_jax.layers.params import AttentionParams, DenseParams
from moment_jax.posterior import Factorized, OutputShared, Point, Posterior
from moment_jax.propagation import arrays, regions
from moment_jax.propagation.arrays import Moments, Places
from moment_jax.propagation.dense import Projection, identity, projection, readings
from moment_jax.propagation.errors import LINEARISE, refuse
from moment_jax.propagation.graph import Node, weights_in
from moment_jax.propagation.joins import combined
from moment_jax.propagation.propagator import Pooled, Propagator, pattern
from moment_jax.propagation.weights import Weight, overlap, select


class Rows(NamedTuple):
    """What the rows of the scores' softmax see; arrays, or None where it holds for all of them."""

    mask: Any  # where a weight may be positive
    level: Any = None  # tokens whose weights do not depend on the scores, such as masked ones, (T,)
    lost: Any = None  # of them, those without a defined weight, (T,)
    even: Any = None  # the weights of these tokens, (T, S)


@dataclass(frozen=True, eq=False)
class Core(arrays.View):
    """Attention without its output projection: (T, H K), with heads outermost in the features."""

    parts: tuple[Projection, ...]  # queries, keys and values
    columns: tuple[Places, ...]  # of these layers, (H, K)
    places: Places  # of the array's entries, in (T, H K)
    rows: Rows

    @property
    def width(self) -> int:
        """H K."""
        return self.columns[0].size

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
        kernel: Any = Point(jnp.eye(core.width, dtype=core.parts[0].x.mean.dtype))
        return _moments(propagator, node, core, kernel, core.places)
    for side, value, weight, own, other in readings(node):
        core = regions.through_views(value, partial(_core, propagator))
        tied = overlap(weights_in(value), [weight])
        if core is None or tied or any(core.shape[i] > 1 for i in own.batch):
            continue
        # It has to take the features of each token in one order.
        rows = arrays.as_rows(core.places, own.free, own.contracted)
        features = rows[0] + np.arange(len(rows))[:, None] * core.width
        if rows.shape[1] == core.width and np.array_equal(rows, features):
            entries = arrays.as_rows(weight.places, other.contracted, other.free)
            kernel = select(weight.posterior, entries[np.argsort(rows[0])])
            places = arrays.in_product(node, side, arrays.numbered(node.shape))
            return None if kernel is None else _moments(propagator, node, core, kernel, places)
    return None


def _moments(
    propagator: Propagator, node: Node, core: Core, kernel: Posterior, places: Places
) -> Moments | None:
    """Moments of attention with this output projection."""
    query, key, value = core.parts
    (mask, level, *_), x, source = core.rows, query.x, key.x
    own = x.mean is source.mean
    # Nothing is hidden by order where each looks at whom it is seen by, as in a batch of sequences.
    mutual = arrays.is_known(mask) and mask.ndim == 2 and np.array_equal(mask, np.transpose(mask))
    if own and propagator.pool is None and propagator.structure.pools:
        pool = propagator.pool_read(len(x.mean), mask)
        if pool is not None:
            raise Pooled(pool, True)
        if not (mutual or mask is None):
            seen = pool_seen(mask, jnp.zeros(len(x.mean), bool))
            raise Pooled(seen.astype(x.cov.dtype), False)
    read = mutual or (own and propagator.reading and source.cov.pool is propagator.pool)
    seen = source.cov if read else source.cov.seen_by(mask, memory=not own)
    layers: Any = [part.params(c) for part, c in zip(core.parts, core.columns, strict=True)]
    if None in layers:
        return None  # no family for these columns
    of_query, of_key, of_value = layers
    params = AttentionParams(of_query, of_key, of_value, DenseParams(kernel))
    rotation = query.rotation
    if level is not None:  # no score without a query
        unit = jnp.eye(core.columns[0].shape[1], dtype=x.mean.dtype)[None]
        rotation = jnp.where(level[:, None, None], 0, unit if rotation is None else rotation)
    mean, cov, carried = attention_with_carry(
        x.mean, seen if own else x.cov, params, len(core.columns[0]), mask, 2,
        memory=None if own else (source.mean, seen), turns=(rotation, key.rotation),
    )  # fmt: skip
    if level is not None:
        mean, cov = _with_level_rows(core, kernel, mean, cov)
    parent: Any = x, carried
    assumed = "input and weights independent"
    if not own and not isinstance(query.source, Node):
        parent = source, lambda cross: carried(None, cross)
    elif not own:
        assumed += "; x and memory too"
        if overlap(weights_in(query.source), weights_in(key.source)):
            assumed += ", though x has attended to it before"
        for part in (key, value):
            part.product.memory = True
    if cov.entrywise and core.shares_columns:
        assumed += "; heads too, though they share keys or values"
    if query.rotation is not None or key.rotation is not None:
        assumed += "; rotary positions turn means, and covariances as far as the structure can"
    propagator.note(node, "attention" if own else "cross_attention", assumed)
    return arrays.made(mean, cov, places, parent)


def _with_level_rows(core: Core, kernel: Posterior, mean: Any, cov: Any) -> tuple[Any, Any]:
    """The moments, with averages of the values in the rows that do not depend on the scores."""
    value, (_, level, lost, even) = core.parts[2], core.rows
    width = value.layer.kernel.shape[1]
    pick = jax.nn.one_hot(core.columns[2].ravel(), width, dtype=mean.dtype).T
    average, spread = dense(even @ value.x.mean, value.x.cov.map_tokens(even), value.layer)
    average, spread = dense(average @ pick, spread.map_features(pick), DenseParams(kernel))
    mean = jnp.where(level[:, None], average, mean)
    size = safe_sqrt(safe_divide(spread.variance(), cov.variance()))
    cov = cov.rescale(jnp.where(level[:, None], size, 1))
    return jnp.where(lost[:, None], jnp.nan, mean), cov


def _core(propagator: Propagator, node: Node) -> Core | None:
    """A product of attention weights and values, or None."""
    for side in (0, 1) if node.op == "dot_general" else ():
        weights, values = node.operands[side], node.operands[1 - side]
        if not isinstance(weights, Node) or isinstance(values, Weight):
            continue
        before = regions.sources(weights, lambda n: n.op in regions.BY_ROW)
        scores = next((x for x in before if x.op == "dot_general"), None)
        if scores is None or any(isinstance(x, Weight) for x in scores.operands):
            continue
        if not any(n.op in ("exp", "exp2") for n in regions.between(weights, [scores])):
            continue
        # As layers of one array, or else as one array in which all three stand side by side.
        nodes = (*scores.operands, values)
        parts: list[Any] = [projection(propagator, x) for x in nodes]
        layers = None not in parts and _each_used_once(nodes, parts)
        found = _layout(node, side, weights, scores, parts) if layers else None
        of_layers = False
        if found is not None:  # in `Diagonal` heads may share columns: its entries are independent
            _, key, value = found[0].parts
            apart = propagator.structure.entrywise or not found[0].shares_columns
            of_layers = key.x.mean is value.x.mean and apart
        if not of_layers:
            axes = *arrays.factors(scores), arrays.factors(node)[1 - side]
            features = [(*a.batch, *a.contracted) for a in axes[:2]]
            features.append((*axes[2].batch, *axes[2].free))
            parts = [identity(propagator, *x) for x in zip(nodes, features, strict=True)]
            found = _layout(node, side, weights, scores, parts)
        if found is None:
            return None
        core, *tables = found
        width = core.columns[0].shape[1]
        told = _softmax(propagator, weights, scores, width, *tables)
        if told is None or core.columns[2].shape[1] != width:
            return None
        factor, rows = told
        query, *others = core.parts
        query = query if factor == 1 else query.times(factor)
        core = replace(core, parts=(query, *others), rows=rows)
        return core if of_layers else _side_by_side(propagator, node, core)
    return None


def _side_by_side(propagator: Propagator, node: Node, core: Core) -> Core:
    """Queries, keys and values as one array with all that they share, and layers that pick them."""
    inputs = [part.x for part in core.parts]
    queries, keys = len(inputs[0].mean), len(inputs[1].mean)
    count, ends = max(queries, keys), np.cumsum([x.mean.shape[1] for x in inputs])
    placed = []
    for x, end in zip(inputs, ends, strict=True):
        t, width = x.mean.shape
        order = np.full((count, ends[-1]), -1)
        order[:t, end - width : end] = x.order
        placed.append(x.base.at(order))
    base, _ = combined(propagator, node, placed)
    base.node = node
    whole = propagator.pooled(Moments(base, arrays.numbered(base.mean.shape)))
    both = whole.sequence((0,), (1,))
    layer = DenseParams(Point(jnp.eye(ends[-1], dtype=base.mean.dtype)))
    columns = tuple(c + start for c, start in zip(core.columns, (0, *ends[:-1]), strict=True))

    def more(array: Any, *sizes: int) -> Any:
        """The array with zeros beyond its ends, for further queries and keys."""
        if array is None or queries == keys:
            return array
        wide = zip(array.shape, (*sizes, *array.shape[len(sizes) :]), strict=False)
        return jnp.pad(array, [(0, new - old) for old, new in wide])

    parts = [replace(p, x=both, layer=layer, rotation=more(p.rotation, count)) for p in core.parts]
    parts[0] = parts[0].times(core.parts[0].layer.kernel.mean[0, 0])  # the scale of the scores
    mask = core.rows.mask
    if queries != keys:  # nobody looks at further keys
        mask = jnp.ones((1, keys), bool) if mask is None else mask
        mask = jnp.broadcast_to(mask, (len(columns[0]), queries, keys))
        further = (0, 0), (0, count - queries), (0, 0)
        mask = more(jnp.pad(mask, further, constant_values=True), len(columns[0]), count, count)
    rows = Rows(mask, *(more(x, count, count) for x in core.rows[1:]))
    return replace(core, parts=tuple(parts), columns=columns, rows=rows)


def _each_used_once(nodes: tuple[Node, ...], parts: list[Projection]) -> bool:
    """Whether queries, keys and values use no weight twice, nor one on which x depends."""
    before = [weights_in(part.source) for part in parts]
    starts = [part.source if isinstance(part.source, Node) else None for part in parts]
    after = [regions.weights_of(n, [start]) for n, start in zip(nodes, starts, strict=True)]
    inside = (regions.between(n, [start]) for n, start in zip(nodes, starts, strict=True))
    if any(n.tied for group in inside for n in group):
        return False
    if any(overlap(a, b) for a in after for b in before):
        return False
    # The weights on which x depends other than through what it attended to before.
    query = [] if starts[0] is None else regions.weights_of(starts[0], [])
    for i, j in itertools.combinations(range(3), 2):
        a, b = parts[i], parts[j]
        width = a.layer.kernel.shape[1]
        if a.product is b.product:
            entrywise = isinstance(a.layer.kernel, Factorized | OutputShared | Point)
            if not entrywise or np.intersect1d(a.places % width, b.places % width).size:
                return False
        elif overlap(after[i], after[j]):
            return False
        if a.x.mean is not b.x.mean and overlap(query if i == 0 else before[i], before[j]):
            return False
    return True


_LOOKED_AT: dict[Any, Any] = {}  # by operations and places: networks repeat them, and passes


def _softmax(
    propagator: Propagator, weights: Node, scores: Node, width: int, at_scores: Places,
    at_weights: Places,
) -> tuple[float, Rows] | None:  # fmt: skip
    """Scale, times sqrt(width), and mask, read off the weights' values; None if they are no softmax."""
    odd = regions.misfit(weights, scores, regions.SOFTMAX)
    if odd is not None:
        what = f"attention with `{odd.op}` between its scores and its weights"
        raise refuse(what, odd.source, f"Without it, attention has a rule; or {LINEARISE}.")
    tables = at_scores, at_weights
    key = regions.signature(weights, scores), width, *map(arrays.digest, tables)
    if key not in _LOOKED_AT:
        _LOOKED_AT[key] = _looked_at(weights, scores, width, *tables)
    if _LOOKED_AT[key] is None:
        return None
    factor, rows = _LOOKED_AT[key]
    inside = ((n, y) for n in regions.between(weights, [scores]) for y in n.operands)
    traced = [(n, y) for n, y in inside if not (isinstance(y, Node) or arrays.is_known(y))]
    if traced:
        both = (x.astype(scores.dtype) for x in _trials(scores))
        found = [regions.compute([weights], {scores: x})[0] for x in both]
        rows = _rows(*(arrays.take(y, at_weights) for y in found))
        if _same_for_all(propagator, traced, scores, at_scores):
            rows = rows._replace(mask=rows.mask[0, :1])
    elif rows.mask is not None:
        rows = rows._replace(mask=jnp.asarray(rows.mask))
    return factor, rows


def _trials(scores: Node) -> tuple[np.ndarray, np.ndarray]:
    """Scores of zero, and random ones."""
    x = np.random.default_rng(0).normal(size=scores.shape)
    return np.zeros(scores.shape), x.astype(scores.dtype).astype(float)


def _looked_at(
    weights: Node, scores: Node, width: int, at_scores: Places, at_weights: Places
) -> tuple[float, Rows] | None:
    """`_softmax` of masks that are known, all others taken as open."""
    zero, x = _trials(scores)
    flat, noisy, large = (
        arrays.take(regions.probe(weights, scores, s, regions.stand_in), at_weights)
        for s in (zero, x, 16 * x)
    )
    rows, used = _rows(flat, noisy), arrays.take(x, at_scores)
    if rows.level is not None:  # known to be: no scores there
        used = np.where(rows.level[:, None], 0, used)
    allowed = rows.mask
    noisy = np.where(np.isnan(noisy), 1 / noisy.shape[-1], noisy)

    def centred(a: np.ndarray) -> np.ndarray:
        total = np.where(allowed, a, 0).sum(-1, keepdims=True)
        return np.where(allowed, a - total / np.maximum(allowed.sum(-1, keepdims=True), 1), 0)

    # The factor of the scores in the softmax, by regression of the log weights on the scores.
    dx, dw = centred(used), centred(np.log(np.where(allowed, noisy, 1.0)))
    square = float((dx**2).sum())
    scale = float((dx * dw).sum()) / square if square > 0 else width**-0.5
    eps = float(jnp.finfo(scores.dtype).eps)
    for size, found in ((1, noisy), (16, large)):
        logits = np.where(allowed, size * scale * used, -np.inf)
        expected = np.exp(logits - logits.max(-1, keepdims=True))
        expected = expected / expected.sum(-1, keepdims=True)
        found = np.where(np.isnan(found).any(-1, keepdims=True), expected, found)  # overflown
        if not np.allclose(found, expected, atol=min(1e4 * eps, 0.1)):
            return None  # biases of scores, sinks
    if allowed.all():
        rows = rows._replace(mask=None)
    elif (allowed == allowed[:1]).all():
        same = (allowed == allowed[:1, :1]).all()
        rows = rows._replace(mask=allowed[0, :1] if same else allowed[0])
    factor = scale * width**0.5
    return 1.0 if abs(factor - 1) < min(1e3 * eps, 0.01) else factor, rows


def _same_for_all(
    propagator: Propagator, masks: list[tuple[Node, Any]], scores: Node, at_scores: Places
) -> bool:
    """Whether masks that are not known while tracing are the same for all heads and queries."""
    row_of = np.empty(scores.size, int)  # of each score, its head and query
    heads, queries, keys = at_scores.shape
    row_of[at_scores.ravel()] = np.repeat(np.arange(heads * queries), keys)
    for node, mask in masks:
        places = regions.follow(node, scores)
        if places is None or np.shape(mask) != tuple(node.shape):
            return False
        row = row_of[places]
        varying = {i for i in range(row.ndim) if (row != row.take([0], i)).any()}
        if not varying <= propagator.repeats.get(id(mask), (mask, set()))[1]:
            return False
    return True


def _rows(flat: Any, noisy: Any) -> Rows:
    """What rows see, from the weights (H, T, S) of zero scores and of others."""
    known = arrays.is_known(flat)
    xp: Any = np if known else jnp
    lost = xp.isnan(flat).any(-1)
    level = (xp.abs(flat - noisy) < 1e-6).all(-1) & ((flat > 0).sum(-1) > 1) | lost
    apart = (level != level[:1]).any(0) | (lost != lost[:1]).any(0)
    mask = (flat > 0) | lost[..., None]
    if known and (apart.any() or not level.any()):
        return Rows(mask)
    # Rows that are level in some heads alone have no rule; while tracing nobody can see them.
    return Rows(mask, level[0], lost[0] | apart, xp.nan_to_num(flat[0]))


def _layout(
    node: Node, side: int, weights: Node, scores: Node, parts: list[Projection]
) -> tuple[Core, Places, Places] | None:
    """Attention whose output is `node`, with the weights on this side of the product.

    And the places of the scores, and of the weights, in their arrays, (H, T, S). `parts` are the left
    and the right factor of the scores, and the values.
    """
    shown = regions.follow(weights, scores)
    if shown is None:
        return None
    own, other = arrays.factors(node)[side], arrays.factors(node)[1 - side]
    # Places of the scores and of the weights, (batch, rows, keys) of the product, like all that follows.
    at, entry = arrays.as_rows(shown, *own), arrays.as_rows(arrays.numbered(weights.shape), *own)
    # The token and the columns of each row of the left and of the right factor of the scores.
    both = [p.decoded(*f) for p, f in zip(parts, arrays.factors(scores), strict=False)]
    whole = *both[0][0].shape[:2], both[1][0].shape[1]
    in_order = arrays.in_order(at, whole)  # then an open grid has the same indices in less time
    grid: Any = np.ogrid[tuple(map(slice, whole))] if in_order else np.unravel_index(at, whole)
    batch, *rows = grid
    left, right = (
        np.broadcast_to(t[batch, i, 0], at.shape) for (t, _), i in zip(both, rows, strict=True)
    )
    swapped = bool((left != left[..., :1]).any())
    if swapped or (left.shape[-1] == 1 and left.max() > right.max()):  # keys on the left
        left, right, rows, both = right, left, rows[::-1], both[::-1]
        parts = [parts[1], parts[0], parts[2]]
    query, key = left, right
    heads, head = np.unique(both[0][1][..., 0], return_inverse=True)
    head = np.broadcast_to(head.reshape(both[0][1].shape[:2])[batch, rows[0]], at.shape)
    # A batch of sequences is one sequence, in which each looks at its own tokens: -1 elsewhere.
    shape = len(heads), *(len(np.unique(t[..., 0])) for t, _ in both)
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
    batch, *rows = (np.broadcast_to(x, at.shape)[b, i, j] for x in (batch, *rows))
    columns = [c[batch, row] for (_, c), row in zip(both, rows, strict=True)]
    columns.append(value_columns[b, j])
    if (value_columns != columns[2][head[:, 0, 0]][:, None]).any():
        return None
    width = columns[2].shape[-1]
    output = (query[..., 0] * len(heads) + head[..., 0])[..., None] * width + np.arange(width)
    output = arrays.in_product(node, side, output)
    at_scores, at_weights = (np.where(table < 0, -1, x.ravel()[table]) for x in (at, entry))
    return Core(tuple(parts), tuple(columns), output, Rows(None)), at_scores, at_weights
