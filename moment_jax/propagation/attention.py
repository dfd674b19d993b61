"""Attention, recognised by what it computes: softmax of products of two projections, times a third."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from moment_jax.covariance import Separable
from moment_jax.layers.attention import attended
from moment_jax.layers.params import AttentionParams, DenseParams
from moment_jax.layers.seen import pool_seen
from moment_jax.posterior import Point
from moment_jax.propagation.branches import through_layer
from moment_jax.propagation.dense import Projection, projection
from moment_jax.propagation.graph import Node, as_weight, weights_in
from moment_jax.propagation.moments import Moments, as_rows
from moment_jax.propagation.primitives import factors, in_product, is_known, is_view, moved
from moment_jax.propagation.propagator import Pooled, Propagator, pattern
from moment_jax.propagation.regions import (
    BY_ROW,
    between,
    compute,
    follow,
    probe,
    sources,
    stand_in,
    weights_of,
)
from moment_jax.propagation.weights import Weight, overlap, select


class Layout(NamedTuple):
    """The head, query and key of each entry of the scores and weights."""

    query_columns: np.ndarray  # (H, K)
    key_columns: np.ndarray
    value_columns: np.ndarray
    scores: np.ndarray  # places of the scores in their array, (H, T, S)
    weights: np.ndarray  # places of the weights in theirs, (H, T, S)
    swapped: bool  # whether the keys are the left factor of the scores
    output: np.ndarray  # places of the output's entries in (T, H K)


class Core(NamedTuple):
    """Attention without its output projection: (T, H K), with heads outermost in the features."""

    query: Projection
    key: Projection
    params: tuple[DenseParams, DenseParams, DenseParams]  # of queries, keys and values
    num_heads: int
    mask: Any
    places: np.ndarray  # of the array's entries, in (T, H K)

    @property
    def width(self) -> int:
        """H K."""
        return self.params[0].kernel.shape[1]


@pattern
def _attention(propagator: Propagator, node: Node) -> Moments | None:
    """Attention with its output projection if one follows: heads then keep their common noise."""
    if node.op != "dot_general":
        return None
    core = _core(propagator, node)
    if core is not None:
        identity = DenseParams(Point(jnp.eye(core.width, dtype=core.query.x.mean.dtype)))
        return _moments(propagator, node, core, identity, core.places)
    for side in (0, 1):
        weight = as_weight(node.operands[1 - side])
        core = None if weight is None else _seen_core(propagator, node.operands[side])
        if core is not None and weight is not None:
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
    kernel = select(
        weight.posterior,
        as_rows(weight.places, other.contracted, other.free)[np.argsort(columns)],
    )
    if kernel is None:
        return None
    places = in_product(node, side, np.arange(node.size))
    return _moments(propagator, node, core, DenseParams(kernel), places)


def _moments(
    propagator: Propagator, node: Node, core: Core, output: DenseParams, places: np.ndarray
) -> Moments:
    query, key, mask = core.query, core.key, core.mask
    x, source = query.x, key.x
    own = x.mean is source.mean
    if own and propagator.pool is None and mask is not None and isinstance(x.cov, Separable):
        zeros = type(source.cov).zeros(source.cov.shape, source.cov.dtype)
        raise Pooled(pool_seen(zeros, mask).pool)
    seen = pool_seen(source.cov, mask, memory=not own)
    cov = seen if own else x.cov

    def attend(cross: Any) -> Any:
        return attended(
            x.mean,
            cov,
            cross,
            AttentionParams(*core.params, output),
            core.num_heads,
            mask,
            2,
            memory=None if own else (source.mean, seen),
            turns=(query.turn, key.turn),
        )

    mean, out, branches = through_layer(x, cov, attend)
    assumed = "input and weights independent; heads too, even if they share keys or values"
    if not own:
        assumed += "; x and memory too"
    if query.turn is not None or key.turn is not None:
        assumed += "; rotary positions turn means, and covariances as far as the structure can"
    propagator.note(node, "attention" if own else "cross_attention", assumed)
    return Moments(mean, out, places, branches)


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
        scores = _find_scores(weights)
        if scores is None:
            continue
        nodes = (*scores.operands, values)
        left, right, value = (projection(propagator, x) for x in nodes)
        if left is None or right is None or value is None:
            return None  # such as normalised queries
        layout = _find_layout(node, side, weights, scores, left, right, value)
        if layout is None or not _each_used_once(nodes, (left, right, value)):
            return None
        query, key = (right, left) if layout.swapped else (left, right)
        if key.x.mean is not value.x.mean:
            return None
        return _read(weights, scores, (query, key, value), layout)
    return None


def _each_used_once(nodes: Sequence[Node], parts: Sequence[Projection]) -> bool:
    """Whether queries, keys and values use no weight twice, nor one on which x depends."""
    before = [weights_in(part.source) for part in parts]
    after = [weights_of(node, _start(part)) for node, part in zip(nodes, parts, strict=True)]
    tied = (n.tied for node, p in zip(nodes, parts, strict=True) for n in between(node, _start(p)))
    if any(tied) or any(overlap(a, b) for a in after for b in before):
        return False
    for i, j in itertools.combinations(range(3), 2):
        a, b = parts[i], parts[j]
        width = a.layer.kernel.shape[1]
        if a.product is b.product:
            if np.intersect1d(a.places % width, b.places % width).size:
                return False
        elif overlap(after[i], after[j]):
            return False
        if a.x.mean is not b.x.mean and overlap(before[i], before[j]):
            return False  # of x and its memory
    return True


def _start(part: Projection) -> Node | None:
    return part.source if isinstance(part.source, Node) else None


def _read(
    weights: Node, scores: Node, parts: tuple[Projection, Projection, Projection], layout: Layout
) -> Core | None:
    """Mask, scale and parameters, read off the values of the weights."""
    query, key, value = parts
    num_heads, width = layout.query_columns.shape
    zero = np.zeros(scores.shape, scores.dtype)
    x = np.random.default_rng(0).normal(size=scores.shape)
    flat, noisy = (probe(weights, scores, s, stand_in).ravel()[layout.weights] for s in (zero, x))
    x = x.ravel()[layout.scores]
    allowed = flat > 0
    scale = _scale(x, noisy, allowed, width)
    logits = np.where(allowed, scale * x, -np.inf)
    expected = np.exp(logits - np.where(allowed, logits, -np.inf).max(-1, keepdims=True))
    expected = expected / expected.sum(-1, keepdims=True)
    eps = float(jnp.finfo(scores.dtype).eps)
    if not np.allclose(noisy, expected, atol=1e4 * eps):
        return None  # biases of scores, soft caps, sinks
    mask: Any = None if allowed.all() else jnp.asarray(allowed)
    (computed,) = compute([weights], {scores: zero})
    if not is_known(computed):
        mask = computed.reshape(-1)[layout.weights] > 0
    elif mask is not None and (allowed == allowed[:1]).all():
        mask = mask[0]
    factor = scale * width**0.5
    scaled = query if abs(factor - 1) < 1e3 * eps else query.times(factor)
    of_query, of_key, of_value = (
        scaled.params(layout.query_columns),
        key.params(layout.key_columns),
        value.params(layout.value_columns),
    )
    if of_query is None or of_key is None or of_value is None:
        return None  # shared keys whose family cannot repeat weights
    if layout.value_columns.shape[1] != width:
        return None
    return Core(query, key, (of_query, of_key, of_value), num_heads, mask, layout.output)


def _scale(x: np.ndarray, weights: np.ndarray, allowed: np.ndarray, width: int) -> float:
    """The factor of the scores in the softmax, by regression of the log weights on the scores."""

    def centred(a: np.ndarray) -> np.ndarray:
        total = np.where(allowed, a, 0).sum(-1, keepdims=True)
        return np.where(allowed, a - total / np.maximum(allowed.sum(-1, keepdims=True), 1), 0)

    dx, dw = centred(x), centred(np.log(np.where(allowed, weights, 1.0)))
    total = float((dx**2).sum())
    return float((dx * dw).sum()) / total if total > 0 else width**-0.5


def _find_scores(weights: Node) -> Node | None:
    """The product of two random arrays from which these weights are computed."""
    for source in sources(weights, lambda n: n.op in BY_ROW):
        if source.op == "dot_general":
            return source if len(source.nodes) == 2 else None
    return None


def _find_layout(
    node: Node, side: int, weights: Node, scores: Node, left: Projection, right: Projection,
    value: Projection,
) -> Layout | None:  # fmt: skip
    """The layout of attention whose output is `node`, with the weights on this side of the product."""
    shown = follow(weights, scores)
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
    return Layout(
        *columns, value_columns[pick[0], pick[2]], at.ravel()[table], entry.ravel()[table], swapped,
        in_product(node, side, output),
    )  # fmt: skip
