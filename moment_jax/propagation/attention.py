"""Attention, recognised by what it computes: softmax of products of two projections, times a third."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.covariance import Diagonal, Separable
from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.layers.attention import attended
from moment_jax.layers.dense import dense
from moment_jax.layers.params import AttentionParams, DenseParams
from moment_jax.layers.seen import pool_seen
from moment_jax.posterior import Factorized, OutputShared, Point
from moment_jax.propagation import arrays, regions
from moment_jax.propagation.dense import Projection, projection, turned
from moment_jax.propagation.errors import LINEARISE, refuse
from moment_jax.propagation.graph import Node, as_weight, weights_in
from moment_jax.propagation.joins import joined
from moment_jax.propagation.propagator import Pooled, Propagator, pattern
from moment_jax.propagation.weights import Weight, overlap, select


class Core(NamedTuple):
    """Attention without its output projection: (T, H K), with heads outermost in the features."""

    parts: tuple[Projection, ...]  # queries, keys and values
    columns: tuple[np.ndarray, np.ndarray, np.ndarray]  # of these, (H, K)
    places: np.ndarray  # of the array's entries, in (T, H K)
    rows: Any = None  # what they see, `Rows`

    @property
    def width(self) -> int:
        """H K."""
        return self.columns[0].size


class Rows(NamedTuple):
    """What the rows of the scores' softmax see; arrays, or None where it holds for all of them."""

    mask: Any  # where a weight may be positive
    level: Any = None  # tokens whose weights do not depend on the scores, such as masked ones, (T,)
    lost: Any = None  # of them, those without a defined weight, (T,)
    even: Any = None  # the weights of these tokens, (T, S)


@pattern
def _attention(propagator: Propagator, node: Node) -> arrays.Moments | None:
    """Attention with its output projection if one follows: heads then keep their common noise."""
    if node.op != "dot_general":
        return None
    core = _core(propagator, node)
    if core is not None:
        identity = DenseParams(Point(jnp.eye(core.width, dtype=core.parts[0].x.mean.dtype)))
        return _moments(propagator, node, core, identity, core.places)
    for side in (0, 1):
        weight = as_weight(node.operands[1 - side])
        core = None if weight is None else _seen_core(propagator, node.operands[side])
        if (
            core is not None
            and weight is not None
            and not overlap(weights_in(node.operands[side]), [weight])
        ):
            return _projected(propagator, node, core, weight, side)
    return None


def _projected(
    propagator: Propagator, node: Node, core: Core, weight: Weight, side: int
) -> arrays.Moments | None:
    own, other = arrays.factors(node)[side], arrays.factors(node)[1 - side]
    if any(core.places.shape[i] > 1 for i in own.batch):
        return None
    rows = arrays.as_rows(core.places, own.free, own.contracted)
    columns = rows[0]  # in which order the features come
    first = np.arange(len(rows))[:, None] * core.width
    if not np.array_equal(rows, first + columns) or len(columns) != core.width:
        return None
    ordered_rows = arrays.as_rows(weight.places, other.contracted, other.free)[np.argsort(columns)]
    kernel = select(weight.posterior, ordered_rows)
    if kernel is None:
        return None
    places = arrays.in_product(node, side, np.arange(node.size))
    return _moments(propagator, node, core, DenseParams(kernel), places)


def _moments(
    propagator: Propagator, node: Node, core: Core, output: DenseParams, places: np.ndarray
) -> arrays.Moments | None:
    (query, key, value), (mask, level, lost, even) = core.parts, core.rows
    x, source = query.x, key.x
    own = x.mean is source.mean
    # Nothing is hidden by order where each looks at whom it is seen by, as in a batch of sequences.
    mutual = arrays.is_known(mask) and mask.ndim == 2 and np.array_equal(mask, np.transpose(mask))
    if own and propagator.pool is None and isinstance(x.cov, Separable):
        pool = propagator.pool_read(len(x.mean), mask)
        if pool is not None or not (mutual or mask is None):
            zeros = type(source.cov).zeros(source.cov.shape, source.cov.dtype)
            raise Pooled(*((pool_seen(zeros, mask).pool, False) if pool is None else (pool, True)))
    read = mutual or (own and propagator.reading and source.cov.pool is propagator.pool)
    seen = source.cov if read else pool_seen(source.cov, mask, memory=not own)
    cov = seen if own else x.cov
    repeated = any(len(np.unique(c)) < c.size for c in core.columns)
    of_query, of_key, of_value = (
        p.params(c) for p, c in zip(core.parts, core.columns, strict=True)
    )
    if of_query is None or of_key is None or of_value is None:
        return None  # no family for these columns
    params = AttentionParams(of_query, of_key, of_value, output)
    turn = query.turn
    if level is not None:  # no score without a query
        k = core.columns[0].shape[1]
        turn = jnp.eye(k, dtype=x.mean.dtype)[None] if turn is None else turn
        turn = jnp.where(level[:, None, None], 0, turn)

    mean, out, carried = attended(
        x.mean, cov, params, len(core.columns[0]), mask, 2,
        memory=None if own else (source.mean, seen), turns=(turn, key.turn),
    )  # fmt: skip
    parent: Any = x, carried
    if not own and not isinstance(query.source, Node):
        parent = source, lambda cross: carried(None, cross)
    if level is not None:  # averages of the values
        width = value.layer.kernel.shape[1]
        pick = jax.nn.one_hot(core.columns[2].ravel(), width, dtype=mean.dtype).T
        average, of_average = dense(even @ source.mean, source.cov.map_tokens(even), value.layer)
        average, of_average = dense(average @ pick, of_average.map_features(pick), output)
        mean = jnp.where(level[:, None], average, mean)
        mean = jnp.where(lost[:, None], jnp.nan, mean)
        size = safe_sqrt(safe_divide(of_average.variance(), out.variance()))
        out = out.rescale(jnp.where(level[:, None], size, 1))
    assumed = "input and weights independent"
    if not own and isinstance(query.source, Node):
        assumed += "; x and memory too"
        if overlap(weights_in(query.source), weights_in(key.source)):
            assumed += ", though x has attended to it before"
        for part in (key, value):
            part.product.memory = True
    if repeated and isinstance(cov, Diagonal):
        assumed += "; heads too, though they share keys or values"
    if query.turn is not None or key.turn is not None:
        assumed += "; rotary positions turn means, and covariances as far as the structure can"
    propagator.note(node, "attention" if own else "cross_attention", assumed)
    return arrays.made(mean, out, places, parent)


def _seen_core(propagator: Propagator, node: Any) -> Core | None:
    """Attention seen through views."""
    if not isinstance(node, Node):
        return None
    if node.op == "dot_general":
        return _core(propagator, node)
    first, *rest = node.operands
    core = _seen_core(propagator, first) if arrays.is_view(node) else None
    seen = None if core is None else arrays.moved(node, core.places, rest)
    return None if core is None or seen is None else core._replace(places=seen[node.output])


def _core(propagator: Propagator, node: Node) -> Core | None:
    """A product of attention weights and values, or None."""
    for side in (0, 1):
        weights, values = node.operands[side], node.operands[1 - side]
        if not isinstance(weights, Node) or isinstance(values, Weight):
            continue
        before = regions.sources(weights, lambda n: n.op in regions.BY_ROW)
        scores = next((x for x in before if x.op == "dot_general"), None)
        if scores is None or any(isinstance(x, Weight) for x in scores.operands):
            continue
        nodes = (*scores.operands, values)
        found = (projection(propagator, x) for x in nodes)
        parts = tuple(part for part in found if part is not None)
        layout = None
        if len(parts) == 3 and _each_used_once(nodes, parts):
            layout = _find_layout(node, side, weights, scores, parts)
        apart = layout is not None and _apart(propagator, layout[0])
        if not apart:
            if not any(n.op == "exp" for n in regions.between(weights, [scores])):
                continue
            axes = *arrays.factors(scores), arrays.factors(node)[1 - side]
            features = (
                *((*a.batch, *a.contracted) for a in axes[:2]), (*axes[2].batch, *axes[2].free)
            )  # fmt: skip
            parts = tuple(map(partial(_as_it_is, propagator), nodes, features))
            layout = _find_layout(node, side, weights, scores, parts)
        core = None if layout is None else _read(propagator, weights, scores, *layout)
        return core if core is None or apart else _side_by_side(propagator, node, core)
    return None


def _apart(propagator: Propagator, core: Core) -> bool:
    """Whether keys and values are layers of one array, and heads share no columns of any layer.

    In `Diagonal` they may, for its entries are independent anyway.
    """
    repeated = any(len(np.unique(c)) < c.size for c in core.columns)
    if core.parts[1].x.mean is not core.parts[2].x.mean:
        return False
    return not repeated or issubclass(propagator.structure, Diagonal)


def _as_it_is(propagator: Propagator, value: Any, features: arrays.Axes) -> Projection:
    """Any array as a layer of itself, the identity, turned by rotary positions if it has some.

    A certain one has these features.
    """
    if isinstance(value, Node):
        first, *rest = value.operands
        if arrays.is_view(value) and isinstance(first, Node) and all(map(arrays.is_known, rest)):
            inner = _as_it_is(propagator, first, features)
            places = arrays.moved(value, inner.places, rest)
            if inner.turn is not None and places is not None:
                return inner._replace(places=places[value.output])
        else:
            found = turned(propagator, value, partial(_as_it_is, features=features))
            if found is not None:
                return found
    known = not isinstance(value, Node)
    m = propagator.certain(value, features) if known else propagator.moments(value)
    x = m.sequence()
    layer = DenseParams(Point(jnp.eye(x.mean.shape[1], dtype=x.mean.dtype)))
    return Projection(x, layer, arrays.ordered(np.shape(value), *x.axes), value, value)


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
    base = joined(propagator, node, placed)
    base.node = node
    whole = arrays.Moments(base, np.arange(base.mean.size).reshape(base.mean.shape))
    both = propagator.pooled(whole).sequence((0,), (1,))
    layer = DenseParams(Point(jnp.eye(ends[-1], dtype=base.mean.dtype)))
    parts = [part._replace(x=both, layer=layer) for part in core.parts]
    scale = core.parts[0].layer.kernel.mean[0, 0]  # that of the scores
    parts[0] = parts[0].times(scale)
    starts = (0, *ends[:-1])
    columns = tuple(c + start for c, start in zip(core.columns, starts, strict=True))
    mask, level, lost, even = core.rows
    if queries != keys:  # rows and columns that nobody looks at
        grow = [(0, count - queries), (0, count - keys), (0, 0)]
        parts = [
            part
            if part.turn is None
            else part._replace(turn=jnp.pad(part.turn, (n, (0, 0), (0, 0))))
            for part, n in zip(parts, grow, strict=True)
        ]
        mask = jnp.ones((1, queries, keys), bool) if mask is None else mask
        mask = jnp.broadcast_to(mask, (mask.shape[0] if mask.ndim == 3 else 1, queries, keys))
        mask = jnp.pad(mask, ((0, 0), grow[0], (0, 0)), constant_values=True)
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, count - keys)))
        mask = jnp.broadcast_to(mask, (len(core.columns[0]), count, count))
        if level is not None:
            level, lost = (jnp.pad(row, (0, count - queries)) for row in (level, lost))
            even = jnp.pad(even, ((0, count - queries), (0, count - keys)))
    return core._replace(parts=tuple(parts), columns=columns, rows=Rows(mask, level, lost, even))


def _each_used_once(nodes: Sequence[Node], parts: Sequence[Projection]) -> bool:
    """Whether queries, keys and values use no weight twice, nor one on which x depends."""
    before = [weights_in(part.source) for part in parts]
    starts = (part.source if isinstance(part.source, Node) else None for part in parts)
    pairs = list(zip(nodes, starts, strict=True))
    after = [regions.weights_of(end, [start]) for end, start in pairs]
    tied = any(n.tied for pair in pairs for n in regions.between(pair[0], [pair[1]]))
    if tied or any(overlap(a, b) for a in after for b in before):
        return False
    for i, j in itertools.combinations(range(3), 2):
        a, b = parts[i], parts[j]
        width = a.layer.kernel.shape[1]
        if a.product is b.product:
            entrywise = isinstance(a.layer.kernel, Factorized | OutputShared | Point)
            if not entrywise or np.intersect1d(a.places % width, b.places % width).size:
                return False
        elif overlap(after[i], after[j]):
            return False
        if a.x.mean is not b.x.mean and overlap(_own(a.source) if i == 0 else before[i], before[j]):
            return False  # of x and its memory, other than through attention to a memory
    return True


def _own(source: Any) -> Sequence[Weight]:
    """The weights on which an array depends other than through what it attended to before."""
    return regions.weights_of(source, []) if isinstance(source, Node) else []


def _read(
    propagator: Propagator, weights: Node, scores: Node, core: Core, at_scores: np.ndarray,
    at_weights: np.ndarray,
) -> Core | None:  # fmt: skip
    """Mask, scale and parameters, read off the values of the weights."""
    odd = regions.misfit(weights, scores, regions.SOFTMAX)
    if odd is not None:
        what = f"attention with `{odd.op}` between its scores and its weights"
        raise refuse(what, odd.source, f"Without it, attention has a rule; or {LINEARISE}.")
    width = core.columns[0].shape[1]
    zero = np.zeros(scores.shape, scores.dtype)
    x = np.random.default_rng(0).normal(size=scores.shape).astype(scores.dtype).astype(float)
    flat, noisy, large = (
        arrays.taken(regions.probe(weights, scores, s, regions.stand_in), at_weights)
        for s in (zero, x, 16 * x)
    )
    by_scores = _rows(flat, noisy)
    used = arrays.taken(x, at_scores)
    if by_scores.level is not None:  # known to be: no scores there
        used = np.where(by_scores.level[:, None], 0, used)
    allowed = by_scores.mask
    noisy = np.where(np.isnan(noisy), 1 / noisy.shape[-1], noisy)
    scale = _scale(used, noisy, allowed, width)
    eps = float(jnp.finfo(scores.dtype).eps)
    for size, found in ((1, noisy), (16, large)):
        logits = np.where(allowed, size * scale * used, -np.inf)
        expected = np.exp(logits - logits.max(-1, keepdims=True))
        expected = expected / expected.sum(-1, keepdims=True)
        found = np.where(np.isnan(found).any(-1, keepdims=True), expected, found)  # overflown
        if not np.allclose(found, expected, atol=min(1e4 * eps, 0.1)):
            return None  # biases of scores, sinks
    found = [regions.compute([weights], {scores: s})[0] for s in (zero, x.astype(zero.dtype))]
    rows = by_scores
    if not all(map(arrays.is_known, found)):
        rows = _rows(*(arrays.taken(y, at_weights) for y in found))
        if _same_for_all(propagator, weights, scores, at_scores):
            rows = rows._replace(mask=rows.mask[0, :1])
    elif allowed.all():
        rows = rows._replace(mask=None)
    elif (allowed == allowed[:1, :1]).all():
        rows = rows._replace(mask=jnp.asarray(allowed[0, :1]))
    elif (allowed == allowed[:1]).all():
        rows = rows._replace(mask=jnp.asarray(allowed[0]))
    query, *others = core.parts
    factor = scale * width**0.5
    query = query if abs(factor - 1) < min(1e3 * eps, 0.01) else query.times(factor)
    if core.columns[2].shape[1] != width:
        return None
    return core._replace(parts=(query, *others), rows=rows)


def _same_for_all(
    propagator: Propagator, weights: Node, scores: Node, at_scores: np.ndarray
) -> bool:
    """Whether a mask that is not known while tracing is the same for all heads and queries."""
    rows = np.empty(scores.size, int)  # of each score, its head and query
    heads, queries, keys = at_scores.shape
    rows[at_scores.ravel()] = np.repeat(np.arange(heads * queries), keys)
    for node in regions.between(weights, [scores]):
        unknown = [x for x in node.operands if not isinstance(x, Node) and not arrays.is_known(x)]
        if not unknown:
            continue
        places = regions.follow(node, scores)
        if places is None or any(np.shape(x) != tuple(node.shape) for x in unknown):
            return False
        row = rows[places]
        varying = {i for i in range(row.ndim) if (row != row.take([0], i)).any()}
        constant = (propagator.repeats.get(id(x), (x, set()))[1] for x in unknown)
        if not all(varying <= axes for axes in constant):
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


def _scale(x: np.ndarray, weights: np.ndarray, allowed: np.ndarray, width: int) -> float:
    """The factor of the scores in the softmax, by regression of the log weights on the scores."""

    def centred(a: np.ndarray) -> np.ndarray:
        total = np.where(allowed, a, 0).sum(-1, keepdims=True)
        return np.where(allowed, a - total / np.maximum(allowed.sum(-1, keepdims=True), 1), 0)

    dx, dw = centred(x), centred(np.log(np.where(allowed, weights, 1.0)))
    total = float((dx**2).sum())
    return float((dx * dw).sum()) / total if total > 0 else width**-0.5


def _find_layout(
    node: Node, side: int, weights: Node, scores: Node, parts: tuple[Projection, ...]
) -> tuple[Core, np.ndarray, np.ndarray] | None:
    """Attention whose output is `node`, with the weights on this side of the product.

    And the places of the scores, and of the weights, in their arrays, (H, T, S). `parts` are the left
    and the right factor of the scores, and the values.
    """
    left, right, value = parts
    shown = regions.follow(weights, scores)
    if shown is None:
        return None
    own, other = arrays.factors(node)[side], arrays.factors(node)[1 - side]
    at = arrays.as_rows(
        shown, *own
    )  # places of the scores; (batch, rows, keys), like all that follow
    entry = arrays.as_rows(np.arange(weights.size).reshape(weights.shape), *own)
    (lt, lc), (rt, rc) = (
        p.decoded(*f) for p, f in zip((left, right), arrays.factors(scores), strict=True)
    )
    batch, *rows = np.unravel_index(at, (*lt.shape[:2], rt.shape[1]))
    # The token and the first column of both factors of each score.
    (lt, l_first), (rt, r_first) = (
        (t[batch, i, 0], c[batch, i, 0])
        for (t, c), i in zip(((lt, lc), (rt, rc)), rows, strict=True)
    )
    swapped = bool((lt != lt[..., :1]).any()) or (lt.shape[-1] == 1 and bool(lt.max() > rt.max()))
    query, key, first = (rt, lt, r_first) if swapped else (lt, rt, l_first)
    heads, head = np.unique(first, return_inverse=True)
    head = head.reshape(first.shape)
    # A batch of sequences is one sequence, in which each looks at its own tokens: -1 elsewhere.
    shape = len(heads), len(np.unique(query)), len(np.unique(key))
    full = shape[0] * shape[1] * at.shape[-1] == at.size and shape[2] % at.shape[-1] == 0
    if not full or key.max() >= shape[2] or query.max() >= shape[1]:
        return None
    table = np.full(shape, -1)
    table[head, query, key] = np.arange(at.size).reshape(at.shape)
    # Every weight has a place; rows are those of a query, and columns those of a key and a value.
    value_tokens, value_columns = value.decoded(other.batch, other.contracted, other.free)
    by_row = (head == head[..., :1]) & (query == query[..., :1])
    by_key = (key == key[:, :1]).all() and (value_tokens == key[:, 0][:, :, None]).all()
    if (
        (table >= 0).sum() != at.size
        or not by_row.all()
        or not by_key
        or (table[:, 0, 0] < 0).any()
    ):
        return None
    pick = np.unravel_index(table[:, 0, 0], at.shape)  # an entry of each head
    own_columns = value_columns[pick[0], pick[2]][head[:, 0, 0]]
    if (value_columns != own_columns[:, None]).any():
        return None
    l_columns, r_columns = (c[batch[pick], i[pick]] for c, i in zip((lc, rc), rows, strict=True))
    columns = (r_columns, l_columns) if swapped else (l_columns, r_columns)
    width = value_columns.shape[-1]
    output = (query[..., 0] * len(heads) + head[..., 0])[..., None] * width + np.arange(width)
    output = arrays.in_product(node, side, output)
    parts = (right, left, value) if swapped else parts
    core = Core(parts, (*columns, value_columns[pick[0], pick[2]]), output)
    at_scores, at_weights = (np.where(table < 0, -1, x.ravel()[table]) for x in (at, entry))
    return core, at_scores, at_weights
