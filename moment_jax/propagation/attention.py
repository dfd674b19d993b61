"""Attention, recognised by what it computes: softmax of products of two projections, times a third."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Diagonal, Separable
from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.covariance.separable import Cross
from moment_jax.layers.attention import attended
from moment_jax.layers.dense import dense
from moment_jax.layers.params import AttentionParams, DenseParams, with_bias
from moment_jax.layers.seen import pool_seen
from moment_jax.posterior import Factorized, OutputShared, Point
from moment_jax.propagation import regions
from moment_jax.propagation.branches import through_layer
from moment_jax.propagation.dense import Projection, projection
from moment_jax.propagation.graph import Node, as_weight, weights_in
from moment_jax.propagation.moments import Moments, as_rows, ordered
from moment_jax.propagation.primitives import factors, in_product, is_known, is_view, moved
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
def _attention(propagator: Propagator, node: Node) -> Moments | None:
    """Attention with its output projection if one follows: heads then keep their common noise."""
    if node.op == "reduce_sum":
        core = _seen_core(propagator, node.operands[0])
        return None if core is None else _summed(propagator, node, core)
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
) -> Moments | None:
    own, other = factors(node)[side], factors(node)[1 - side]
    if any(core.places.shape[i] > 1 for i in own.batch):
        return None
    rows = as_rows(core.places, own.free, own.contracted)
    columns = rows[0]  # in which order the features come
    first = np.arange(len(rows))[:, None] * core.width
    if not np.array_equal(rows, first + columns) or len(columns) != core.width:
        return None
    ordered_rows = as_rows(weight.places, other.contracted, other.free)[np.argsort(columns)]
    kernel = select(weight.posterior, ordered_rows)
    if kernel is None:
        return None
    places = in_product(node, side, np.arange(node.size))
    return _moments(propagator, node, core, DenseParams(kernel), places)


def _summed(propagator: Propagator, node: Node, core: Core) -> Moments | None:
    """A sum over heads or features, as a known output projection."""
    shape, axes = (core.places.size // core.width, core.width), node.params["axes"]
    m = Moments(jnp.zeros(shape), Diagonal.zeros(shape), core.places)
    tokens, features = m.natural()
    if set(axes) & set(tokens):
        return None
    rows = as_rows(core.places, tokens, features)
    if not np.array_equal(rows, np.arange(shape[0])[:, None] * core.width + rows[0]):
        return None
    left = [i for i in range(m.ndim) if i not in axes]
    entry = np.arange(math.prod(m.shape[i] for i in features if i not in axes))
    entry = entry.reshape([1 if i in axes else m.shape[i] for i in features])
    entry = np.broadcast_to(entry, [m.shape[i] for i in features]).ravel()
    # In some structures an output must be as wide as the input: more columns are zero.
    kernel = np.zeros((core.width, max(entry.max() + 1, core.parts[0].x.mean.shape[1])))
    kernel[rows[0], entry] = 1
    kept = [tuple(left.index(i) for i in g if i not in axes) for g in (tokens, features)]
    places = ordered(node.shape, *kept)
    token, column = np.divmod(places, entry.max() + 1)
    output = DenseParams(Point(jnp.asarray(kernel, core.parts[0].x.mean.dtype)))
    return _moments(propagator, node, core, output, token * kernel.shape[1] + column)


def _moments(
    propagator: Propagator, node: Node, core: Core, output: DenseParams, places: np.ndarray
) -> Moments | None:
    (query, key, value), (mask, level, lost, even) = core.parts, core.rows
    x, source = query.x, key.x
    own = x.mean is source.mean
    if own and propagator.pool is None and isinstance(x.cov, Separable):
        pool = propagator.pool_read(len(x.mean), mask)
        if pool is not None or mask is not None:
            zeros = type(source.cov).zeros(source.cov.shape, source.cov.dtype)
            raise Pooled(*((pool_seen(zeros, mask).pool, False) if pool is None else (pool, True)))
    read = own and propagator.reading and source.cov.pool is propagator.pool
    seen = source.cov if read else pool_seen(source.cov, mask, memory=not own)
    cov = seen if own else x.cov
    if own and isinstance(cov, Diagonal | Separable) and x.mean.shape[1] != output.kernel.shape[1]:
        return None  # these structures carry the covariance with x for outputs as wide as x
    repeated = any(len(np.unique(c)) < c.size for c in core.columns)
    beside = repeated and not isinstance(cov, Diagonal)  # whose entries are independent anyway
    own_layers = [p.params(c) for p, c in zip(core.parts, core.columns, strict=True)]
    if own_layers[0] is None or (not beside and None in own_layers):
        return None  # no family for these columns
    turn = query.turn
    if level is not None:  # no score without a query
        k = core.columns[0].shape[1]
        turn = jnp.eye(k, dtype=x.mean.dtype)[None] if turn is None else turn
        turn = jnp.where(level[:, None, None], 0, turn)

    def attend(cross: Any) -> Any:
        mean, moved, memory = x.mean, cov, (source.mean, seen)
        layers: Sequence[Any] = own_layers
        if beside and own:
            (mean, moved), layers, lift = _beside(mean, cov, core.parts, core.columns)
            if isinstance(cross, Cross):
                cross = cross._replace(features=cross.features @ lift)
            else:
                cross = jnp.einsum("tdsi,ij->tdsj", cross, lift)
        elif beside:
            memory, layers, _ = _beside(*memory, core.parts[1:], core.columns[1:])
            layers = [own_layers[0], *layers]
        of_query, of_key, of_value = layers
        params = AttentionParams(of_query, of_key, of_value, output)
        return attended(
            mean, moved, cross, params, len(core.columns[0]), mask, 2,
            memory=None if own else memory, turns=(turn, key.turn),
        )  # fmt: skip

    mean, out, branches = through_layer(x, cov, attend)
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
    if not own:
        assumed += "; x and memory too"
        if overlap(weights_in(query.source), weights_in(key.source)):
            assumed += ", though x has attended to it before"
        for part in (key, value):
            part.product.memory = True
    if repeated and not beside:
        assumed += "; heads too, though they share keys or values"
    if query.turn is not None or key.turn is not None:
        assumed += "; rotary positions turn means, and covariances as far as the structure can"
    propagator.note(node, "attention" if own else "cross_attention", assumed)
    return Moments(mean, out, places, branches)


def _beside(
    mean: Array, cov: Any, parts: Sequence[Projection], columns: Sequence[np.ndarray]
) -> tuple[tuple[Array, Any], list[DenseParams], Array]:
    """The input and its projections side by side, certain layers that pick columns, and x's kernel.

    Heads that share a column then share its noise, which independent layers cannot express.
    """
    d, dtype = mean.shape[1], mean.dtype
    layers = [p.layer for p in parts]
    lift = jnp.concatenate([jnp.eye(d, dtype=dtype), *(x.kernel.mean for x in layers)], 1)
    means, wide, start, picked = [mean], cov.map_features(lift), d, []
    for layer, chosen in zip(layers, columns, strict=True):
        width = layer.kernel.shape[1]
        noise = with_bias(cov.weight_noise(mean, layer.kernel), layer.bias)
        wide = wide.add(noise.map_features(jnp.eye(width, lift.shape[1], start, dtype=dtype)))
        means.append(layer.mean_output(mean))
        pick = jax.nn.one_hot(start + chosen.ravel(), lift.shape[1], dtype=dtype).T
        picked.append(DenseParams(Point(pick)))
        start += width
    return (jnp.concatenate(means, 1), wide), picked, lift


def _seen_core(propagator: Propagator, node: Any) -> Core | None:
    """Attention seen through views."""
    if not isinstance(node, Node):
        return None
    if node.op == "dot_general":
        return _core(propagator, node)
    first, *rest = node.operands
    core = _seen_core(propagator, first) if is_view(node) else None
    seen = None if core is None else moved(node, core.places, rest)
    return None if core is None or seen is None else core._replace(places=seen[node.output])


def _core(propagator: Propagator, node: Node) -> Core | None:
    """A product of attention weights and values, or None."""
    if len(node.nodes) != 2:
        return None
    for side in (0, 1):
        weights, values = node.operands[side], node.operands[1 - side]
        found = regions.sources(weights, lambda n: n.op in regions.BY_ROW)
        scores = next((x for x in found if x.op == "dot_general"), None)
        if scores is None or len(scores.nodes) != 2:
            continue
        nodes = (*scores.operands, values)
        left, right, value = (projection(propagator, x) for x in nodes)
        if left is None or right is None or value is None:
            return None  # such as normalised queries
        layout = _find_layout(node, side, weights, scores, (left, right, value))
        if layout is None or not _each_used_once(nodes, (left, right, value)):
            return None
        same = layout[0].parts[1].x.mean is value.x.mean  # keys and values of one sequence
        return _read(propagator, weights, scores, *layout) if same else None
    return None


def _each_used_once(nodes: Sequence[Node], parts: Sequence[Projection]) -> bool:
    """Whether queries, keys and values use no weight twice, nor one on which x depends."""
    before = [weights_in(part.source) for part in parts]
    starts = (part.source if isinstance(part.source, Node) else None for part in parts)
    pairs = list(zip(nodes, starts, strict=True))
    after = [regions.weights_of(*pair) for pair in pairs]
    tied = any(n.tied for pair in pairs for n in regions.between(*pair))
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
    return regions.weights_of(source, None) if isinstance(source, Node) else []


def _read(
    propagator: Propagator, weights: Node, scores: Node, core: Core, at_scores: np.ndarray,
    at_weights: np.ndarray,
) -> Core | None:  # fmt: skip
    """Mask, scale and parameters, read off the values of the weights."""
    width = core.columns[0].shape[1]
    zero = np.zeros(scores.shape, scores.dtype)
    x = np.random.default_rng(0).normal(size=scores.shape)
    seen = (regions.probe(weights, scores, s, regions.stand_in) for s in (zero, x))
    flat, noisy = (values.ravel()[at_weights] for values in seen)
    by_scores = _rows(flat, noisy)
    used, noisy = x.ravel()[at_scores], np.where(np.isnan(noisy), 1 / noisy.shape[-1], noisy)
    if by_scores.level is not None:  # known to be: no scores there
        used = np.where(by_scores.level[:, None], 0, used)
    allowed = by_scores.mask
    scale = _scale(used, noisy, allowed, width)
    logits = np.where(allowed, scale * used, -np.inf)
    highest = logits.max(-1, keepdims=True)
    expected = np.exp(logits - highest)
    expected = expected / expected.sum(-1, keepdims=True)
    eps = float(jnp.finfo(scores.dtype).eps)
    if not np.allclose(noisy, expected, atol=1e4 * eps):
        return None  # biases of scores, soft caps, sinks
    found = [regions.compute([weights], {scores: s})[0] for s in (zero, x.astype(zero.dtype))]
    rows = by_scores
    if not all(map(is_known, found)):
        rows = _rows(*(y.reshape(-1)[at_weights] for y in found))
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
    query = query if abs(factor - 1) < 1e3 * eps else query.times(factor)
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
    for node in regions.between(weights, scores):
        unknown = [x for x in node.operands if not isinstance(x, Node) and not is_known(x)]
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
    known = is_known(flat)
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
    own, other = factors(node)[side], factors(node)[1 - side]
    at = as_rows(shown, *own)  # places of the scores; (batch, rows, keys), like all that follow
    entry = as_rows(np.arange(weights.size).reshape(weights.shape), *own)
    (lt, lc), (rt, rc) = (
        p.decoded(*f) for p, f in zip((left, right), factors(scores), strict=True)
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
    shape = len(heads), len(np.unique(query)), at.shape[-1]
    if np.prod(shape) != at.size or key.max() >= shape[2] or query.max() >= shape[1]:
        return None
    table = np.full(shape, -1)
    table[head, query, key] = np.arange(at.size).reshape(at.shape)
    # Every weight has a place; rows are those of a query, and columns those of a key and a value.
    value_tokens, value_columns = value.decoded(other.batch, other.contracted, other.free)
    by_row = (head == head[..., :1]) & (query == query[..., :1])
    by_key = (key == key[:1, :1]).all() and (value_tokens == key[0, 0][:, None]).all()
    if (table < 0).any() or not by_row.all() or not by_key:
        return None
    pick = np.unravel_index(table[:, 0, 0], at.shape)  # an entry of each head
    l_columns, r_columns = (c[batch[pick], i[pick]] for c, i in zip((lc, rc), rows, strict=True))
    columns = (r_columns, l_columns) if swapped else (l_columns, r_columns)
    width = value_columns.shape[-1]
    output = (query[..., 0] * len(heads) + head[..., 0])[..., None] * width + np.arange(width)
    output = in_product(node, side, output)
    parts = (right, left, value) if swapped else parts
    core = Core(parts, (*columns, value_columns[pick[0], pick[2]]), output)
    return core, at.ravel()[table], entry.ravel()[table]
