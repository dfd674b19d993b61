"""Attention, recognised by what it computes: softmax of products of two projections, times a third."""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.layers.dense import dense
from moment_jax.layers.params import AttentionParams, DenseParams
from moment_jax.layers.sublayers import attention_with_carry
from moment_jax.posterior import Factorized, OutputShared, Point
from moment_jax.propagation import arrays, regions
from moment_jax.propagation.arrays import Axes, Moments, Places
from moment_jax.propagation.dense import Projection, identity, projection, rotated
from moment_jax.propagation.errors import LINEARISE, refuse
from moment_jax.propagation.graph import Node, as_weight, weights_in
from moment_jax.propagation.joins import combined
from moment_jax.propagation.propagator import Propagator, pattern
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
    if any(core.shape[i] > 1 for i in own.batch):
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
    (mask, level, *_), x, source = core.rows, query.x, key.x
    own, t = x.same(source), len(x.order)
    # Nothing is hidden by order where each looks at whom it is seen by, as in a batch of sequences.
    mutual = arrays.is_known(mask) and mask.ndim == 2 and np.array_equal(mask, np.transpose(mask))
    if own:
        propagator.find_pool(t, mask, mutual, x.dtype)
    layers: Any = [part.params(c) for part, c in zip(core.parts, core.columns, strict=True)]
    if None in layers:
        return None  # no family for these columns
    rotation = query.rotation
    if level is not None:  # no score without a query
        k = core.columns[0].shape[1]
        rotation = jnp.eye(k, dtype=x.dtype)[None] if rotation is None else rotation
        rotation = jnp.where(level[:, None, None], 0, rotation)
    of_query, of_key, of_value = layers
    params = AttentionParams(of_query, of_key, of_value, output)
    from_memory = not own and not isinstance(query.source, Node)

    def compute() -> tuple[Any, ...]:
        cov = source.cov
        read = mutual or (own and propagator.reading and cov.pool is propagator.pool)
        seen = cov if read else cov.seen_by(mask, memory=not own)
        mean, cov, carried = attention_with_carry(
            x.mean, seen if own else x.cov, params, len(core.columns[0]), mask, 2,
            memory=None if own else (source.mean, seen), turns=(rotation, key.rotation),
        )  # fmt: skip
        if level is not None:
            mean, cov = _with_level_rows(core, output, mean, cov)
        return mean, cov, (lambda cross: carried(None, cross)) if from_memory else carried

    assumed = "input and weights independent"
    if not own and isinstance(query.source, Node):
        assumed += "; x and memory too"
        if overlap(weights_in(query.source), weights_in(key.source)):
            assumed += ", though x has attended to it before"
        for part in (key, value):
            part.product.memory = True
    if propagator.structure.entrywise and core.shares_columns:
        assumed += "; heads too, though they share keys or values"
    if query.rotation is not None or key.rotation is not None:
        assumed += "; rotary positions turn means, and covariances as far as the structure can"
    propagator.note(node, "attention" if own else "cross_attention", assumed)
    shape = t, output.kernel.shape[1]
    return arrays.made(compute, shape, places, source if from_memory else x)


def _with_level_rows(core: Core, output: DenseParams, mean: Any, cov: Any) -> tuple[Any, Any]:
    """The moments, with averages of the values in the rows that do not depend on the scores."""
    value, (_, level, lost, even) = core.parts[2], core.rows
    width = value.layer.kernel.shape[1]
    pick = jax.nn.one_hot(core.columns[2].ravel(), width, dtype=mean.dtype).T
    average, spread = dense(even @ value.x.mean, value.x.cov.map_tokens(even), value.layer)
    average, spread = dense(average @ pick, spread.map_features(pick), output)
    mean = jnp.where(level[:, None], average, mean)
    size = safe_sqrt(safe_divide(spread.variance(), cov.variance()))
    cov = cov.rescale(jnp.where(level[:, None], size, 1))
    return jnp.where(lost[:, None], jnp.nan, mean), cov


def _core(propagator: Propagator, node: Node) -> Core | None:
    """A product of attention weights and values, or None."""
    if node.op != "dot_general":
        return None
    for side in (0, 1):
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
        parts = [projection(propagator, x) for x in nodes]
        layout = None
        if None not in parts and _each_used_once(nodes, parts):
            layout = _layout(node, side, weights, scores, parts)
        of_layers = layout is not None and _of_one_array(propagator, layout[0])
        if not of_layers:
            axes = *arrays.factors(scores), arrays.factors(node)[1 - side]
            features = [(*a.batch, *a.contracted) for a in axes[:2]]
            features.append((*axes[2].batch, *axes[2].free))
            parts = [_as_it_is(propagator, *x) for x in zip(nodes, features, strict=True)]
            layout = _layout(node, side, weights, scores, parts)
        core = None if layout is None else _read(propagator, weights, scores, *layout)
        return core if core is None or of_layers else _side_by_side(propagator, node, core)
    return None


def _of_one_array(propagator: Propagator, core: Core) -> bool:
    """Whether keys and values are layers of one array, and heads share no columns of any layer.

    In `Diagonal` they may, for its entries are independent anyway.
    """
    _, key, value = core.parts
    shared = core.shares_columns and not propagator.structure.entrywise
    return key.x.same(value.x) and not shared


def _as_it_is(propagator: Propagator, value: Any, features: Axes) -> Projection:
    """Any array as a layer of itself, rotated if it is; a certain one has these features."""

    def rotation(n: Node) -> Projection | None:
        return None if arrays.is_view(n) else rotated(n, partial(identity, propagator))

    found = regions.through_views(value, rotation)
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
    rows = core.rows
    if queries != keys:  # further queries and keys, at which nobody looks
        more, none = (0, count - queries), (0, 0)
        beyond = (0, count - keys)
        mask = jnp.ones((1, keys), bool) if rows.mask is None else rows.mask
        mask = jnp.broadcast_to(mask, (len(core.columns[0]), queries, keys))
        mask = jnp.pad(mask, (none, more, none), constant_values=True)
        rows = rows._replace(mask=jnp.pad(mask, (none, none, beyond)))
        if rows.level is not None:
            level, lost = (jnp.pad(row, more) for row in (rows.level, rows.lost))
            rows = Rows(rows.mask, level, lost, jnp.pad(rows.even, (more, beyond)))
        rotations = [part.rotation for part in parts]
        rotations = [
            r if r is None else jnp.pad(r, ((0, count - len(r)), none, none)) for r in rotations
        ]
        parts = [replace(part, rotation=r) for part, r in zip(parts, rotations, strict=True)]
    return replace(core, parts=tuple(parts), columns=columns, rows=rows)


def _each_used_once(nodes: tuple[Node, ...], parts: list[Any]) -> bool:
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
        if not a.x.same(b.x) and overlap(query if i == 0 else before[i], before[j]):
            return False
    return True


def _read(
    propagator: Propagator, weights: Node, scores: Node, core: Core, at_scores: Places,
    at_weights: Places,
) -> Core | None:  # fmt: skip
    """Mask and scale, read off the values of the weights; None if these are no softmax of the scores."""
    odd = regions.misfit(weights, scores, regions.SOFTMAX)
    if odd is not None:
        what = f"attention with `{odd.op}` between its scores and its weights"
        raise refuse(what, odd.source, f"Without it, attention has a rule; or {LINEARISE}.")
    width = core.columns[0].shape[1]
    if core.columns[2].shape[1] != width:
        return None
    zero = np.zeros(scores.shape, scores.dtype)
    x = np.random.default_rng(0).normal(size=scores.shape).astype(scores.dtype).astype(float)
    flat, noisy, large = (
        arrays.take(regions.probe(weights, scores, s, regions.stand_in), at_weights)
        for s in (zero, x, 16 * x)
    )
    rows, used = _rows(flat, noisy), arrays.take(x, at_scores)
    if rows.level is not None:  # known to be: no scores there
        used = np.where(rows.level[:, None], 0, used)
    allowed = rows.mask
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
    both = [regions.compute([weights], {scores: s})[0] for s in (zero, x.astype(zero.dtype))]
    if not all(map(arrays.is_known, both)):
        rows = _rows(*(arrays.take(y, at_weights) for y in both))
        if _same_for_all(propagator, weights, scores, at_scores):
            rows = rows._replace(mask=rows.mask[0, :1])
    elif allowed.all():
        rows = rows._replace(mask=None)
    elif (allowed == allowed[:1]).all():
        same = (allowed == allowed[:1, :1]).all()
        rows = rows._replace(mask=jnp.asarray(allowed[0, :1] if same else allowed[0]))
    query, *others = core.parts
    factor = scale * width**0.5
    query = query if abs(factor - 1) < min(1e3 * eps, 0.01) else query.times(factor)
    return replace(core, parts=(query, *others), rows=rows)


def _same_for_all(propagator: Propagator, weights: Node, scores: Node, at_scores: Places) -> bool:
    """Whether a mask that is not known while tracing is the same for all heads and queries."""
    row_of = np.empty(scores.size, int)  # of each score, its head and query
    heads, queries, keys = at_scores.shape
    row_of[at_scores.ravel()] = np.repeat(np.arange(heads * queries), keys)
    for node in regions.between(weights, [scores]):
        unknown = [x for x in node.operands if not isinstance(x, Node) and not arrays.is_known(x)]
        if not unknown:
            continue
        places = regions.follow(node, scores)
        if places is None or any(np.shape(x) != tuple(node.shape) for x in unknown):
            return False
        row = row_of[places]
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


def _layout(
    node: Node, side: int, weights: Node, scores: Node, parts: list[Any]
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
    both = [p.decoded(*f) for p, f in zip(parts, arrays.factors(scores), strict=False)]
    batch, *rows = np.unravel_index(at, (*both[0][0].shape[:2], both[1][0].shape[1]))
    # The token and the columns of the left and of the right factor of each score.
    tokens, columns = zip(
        *((t[batch, i, 0], c[batch, i]) for (t, c), i in zip(both, rows, strict=True)), strict=True
    )
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
    core = Core(tuple(parts), (*(c[b, i, j] for c in columns), own_columns), output, Rows(None))
    at_scores, at_weights = (np.where(table < 0, -1, x.ravel()[table]) for x in (at, entry))
    return core, at_scores, at_weights
