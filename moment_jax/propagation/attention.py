"""Attention, recognised by what it computes: softmax of products of two projections, times a third."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.layers.attention.multi_head import Memory, attention_and_tangent
from moment_jax.layers.params import AttentionParams, DenseParams
from moment_jax.layers.seen import pool_seen
from moment_jax.posterior import Point
from moment_jax.propagation.branches import Branch
from moment_jax.propagation.dense import branches_of, product_places
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.heads import Layout, find_layout, find_scores
from moment_jax.propagation.moments import Moments, as_rows
from moment_jax.propagation.primitives import is_known, is_view, moved
from moment_jax.propagation.projections import Projection, projection
from moment_jax.propagation.propagator import Pooled, Propagator, as_weight, pattern
from moment_jax.propagation.regions import compute, stand_in


class Core(NamedTuple):
    """Attention without its output projection: (T, H K), with heads outermost in the features."""

    query: Projection
    key: Projection
    value: Projection
    params: tuple[DenseParams, DenseParams, DenseParams]
    num_heads: int
    width: int
    mask: Any
    places: np.ndarray  # of the array's entries, in (T, H K)


@pattern
def _attention(propagator: Propagator, node: Node) -> Moments | None:
    """Attention with its output projection if one follows: heads then keep their common noise."""
    if node.op != "dot_general":
        return None
    core = _core(propagator, node)
    if core is not None:
        identity = jnp.eye(core.num_heads * core.width, dtype=core.query.mean.dtype)
        return _moments(propagator, node, core, DenseParams(Point(identity)), core.places)
    for side in (0, 1):
        weight = as_weight(node.operands[1 - side])
        if weight is None:
            continue
        core = _seen_core(propagator, node.operands[side])
        if core is not None:
            return _projected(propagator, node, core, weight, side)
    return None


def _projected(
    propagator: Propagator, node: Node, core: Core, weight: Any, side: int
) -> Moments | None:
    contract, batch = node.params["dimension_numbers"]
    if any(core.places.shape[i] > 1 for i in batch[side]):
        return None
    inputs = tuple(contract[1 - side])
    outputs = tuple(i for i in range(weight.ndim) if i not in (*inputs, *batch[1 - side]))
    features = tuple(contract[side])
    free = tuple(i for i in range(core.places.ndim) if i not in features)
    rows = as_rows(core.places, free, features)
    tokens, columns = np.divmod(rows, core.num_heads * core.width)
    if (columns != columns[:1]).any() or (tokens != np.arange(len(rows))[:, None]).any():
        return None
    if not np.array_equal(np.sort(columns[0]), np.arange(core.num_heads * core.width)):
        return None
    places = as_rows(weight.places, inputs, outputs)
    ordered = dataclasses.replace(weight, places=places[np.argsort(columns[0])])
    kernel = ordered.kernel((0,), (1,))
    if kernel is None:
        return None
    shape = [core.places.shape[i] for i in free], [weight.shape[i] for i in outputs]
    places = product_places(*shape, side, node.shape)
    return _moments(propagator, node, core, DenseParams(kernel), places)


def _moments(
    propagator: Propagator, node: Node, core: Core, output: DenseParams, places: np.ndarray
) -> Moments:
    params = AttentionParams(*core.params, output)
    query, source = core.query, core.key
    own = query.mean is source.mean
    cov, mask = source.cov, core.mask
    if own and propagator.pool is None:
        wanted = getattr(pool_seen(type(cov).zeros(cov.shape, cov.dtype), mask), "pool", None)
        if wanted is not None:
            raise Pooled(wanted)
    seen = pool_seen(cov, mask, memory=not own)
    mean, out_cov, tangent = attention_and_tangent(
        query.mean,
        seen if own else query.cov,
        params,
        num_heads=core.num_heads,
        mask=mask,
        order=2,
        memory=None if own else Memory(source.mean, seen),
        turns=(query.turn, source.turn),
    )
    assumed = "input and weights independent; heads too, even if they share keys or values"
    if not own:
        assumed += "; x and memory too"
    if query.turn is not None or source.turn is not None:
        assumed += "; rotary positions turn means, and covariances as far as the structure can"
    propagator.note(node, "attention" if own else "cross_attention", assumed)
    m = query.input
    tokens, features = m.natural()
    norms = (b for b in branches_of(m, query.mean, tokens, features) if not b.paths)
    norm = next(norms, None)
    branch = Branch(query.mean, query.mean, query.cov, None, (), tangent)
    if norm is not None and norm.norm is not None:
        branch = dataclasses.replace(branch, mean=norm.mean, norm=norm.norm)
    return Moments(mean, out_cov, places, (branch,))


def _seen_core(propagator: Propagator, node: Any) -> Core | None:
    """Attention seen through views."""
    if not isinstance(node, Node):
        return None
    if node.op == "dot_general":
        return _core(propagator, node)
    rest = list(node.operands[1:])
    if not is_view(node) or any(map(is_random, rest)) or not all(map(is_known, rest)):
        return None
    core = _seen_core(propagator, node.operands[0])
    if core is None:
        return None
    places = moved(node.primitive, core.places, rest, node.params)[node.output]
    return core._replace(places=places)


def _core(propagator: Propagator, node: Node) -> Core | None:
    """A product of attention weights and values, or None."""
    if len(node.nodes) != 2:
        return None
    for side in (0, 1):
        weights, values = node.operands[side], node.operands[1 - side]
        scores = find_scores(weights)
        if scores is None:
            continue
        parts = [projection(propagator, x) for x in (*scores.operands, values)]
        if any(part is None for part in parts):
            return None  # such as normalised queries
        left, right, value = (part for part in parts if part is not None)
        found = find_layout(node, side, weights, scores, left, right, value)
        if found is None:
            return None
        layout, places = found
        query, key = (right, left) if layout.swapped else (left, right)
        if key.mean is not value.mean:
            return None
        return _read(weights, scores, (query, key, value), layout, places)
    return None


def _read(
    weights: Node, scores: Node, parts: tuple[Projection, Projection, Projection],
    layout: Layout, places: np.ndarray,
) -> Core | None:  # fmt: skip
    """Mask, scale and parameters, read off the values of the weights."""
    h, width = layout.query_columns.shape
    query, key, value = parts
    zero = np.zeros(scores.shape, scores.dtype)
    with jax.ensure_compile_time_eval():
        flat = np.asarray(compute(weights, {scores: zero}, stand_in), float).ravel()[layout.weights]
        x = np.random.default_rng(0).normal(size=scores.shape)
        noisy = compute(weights, {scores: jnp.asarray(x, scores.dtype)}, stand_in)
        noisy = np.asarray(noisy, float).ravel()[layout.weights]
    x = x.ravel()[layout.scores]
    allowed = flat > 0
    scale = _scale(x, noisy, allowed, width)
    logits = np.where(allowed, scale * x, -np.inf)
    expected = np.exp(logits - np.where(allowed, logits, -np.inf).max(-1, keepdims=True))
    expected = expected / expected.sum(-1, keepdims=True)
    if not np.allclose(noisy, expected, atol=1e4 * float(jnp.finfo(scores.dtype).eps)):
        return None  # biases of scores, soft caps, sinks
    mask: Any = None if allowed.all() else jnp.asarray(allowed)
    computed = compute(weights, {scores: zero})
    if not is_known(computed):
        mask = computed.reshape(-1)[layout.weights] > 0
    if mask is not None and is_known(mask) and (np.asarray(mask) == np.asarray(mask)[:1]).all():
        mask = mask[0]
    factor = scale * width**0.5
    factor = None if abs(factor - 1) < 1e3 * float(jnp.finfo(scores.dtype).eps) else factor
    columns = (layout.query_columns, layout.key_columns, layout.value_columns)
    params = [
        part.params(c.ravel(), f)
        for part, c, f in zip(parts, columns, (factor, None, None), strict=True)
    ]
    of_query, of_key, of_value = params
    if of_query is None or of_key is None or of_value is None:
        return None  # shared keys whose family cannot repeat weights
    if layout.value_columns.shape[1] != width:
        return None
    return Core(query, key, value, (of_query, of_key, of_value), h, width, mask, places)


def _scale(x: np.ndarray, weights: np.ndarray, allowed: np.ndarray, width: int) -> float:
    """The factor of the scores in the softmax, by regression of the log weights on the scores."""
    safe = np.log(np.where(allowed, weights, 1.0))
    count = np.maximum(allowed.sum(-1, keepdims=True), 1)
    dx, dw = (
        np.where(allowed, a - np.where(allowed, a, 0).sum(-1, keepdims=True) / count, 0)
        for a in (x, safe)
    )
    total = float((dx**2).sum())
    return float((dx * dw).sum()) / total if total > 0 else width**-0.5
