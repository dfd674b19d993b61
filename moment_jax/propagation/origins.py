"""Dense covariances, to first order: of arrays with a common origin, and of what no rule covers."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Diagonal, Separable
from moment_jax.covariance.numerics import safe_divide, safe_sqrt, weighted
from moment_jax.posterior import Posterior
from moment_jax.propagation.errors import PropagationError, refuse, register, shapes
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.linearisation import carried
from moment_jax.propagation.moments import Axes, Moments, as_rows, entries, fresh
from moment_jax.propagation.primitives import VIEWS, factors
from moment_jax.propagation.propagator import LAST, PATTERNS, RULES, Propagator, rule
from moment_jax.propagation.regions import BY_ROW, between, compute, dominators, weights_of
from moment_jax.propagation.weights import Weight
from moment_jax.xla import diagonal_of

LARGEST = 2**24  # most entries of a Jacobian


@rule("dot_general", "cumsum", "scatter", "scatter-add", *sorted(BY_ROW - VIEWS), last=True)
def _linearised(propagator: Propagator, node: Node) -> Moments | None:
    """The array linearised in its nearest dominator and in the weights in between.

    Used for attention with normalised queries or score biases, for example.
    """
    if not node.nodes or not jnp.issubdtype(node.dtype, jnp.floating):
        return None
    source = dominator(node.nodes, propagator.tied, [node])
    weights = weights_of(node, source)
    for inner in between(node, source):
        if inner.op != "belief" and (
            inner.op == "argmax" or not (RULES[inner.op] or LAST[inner.op])
        ):
            propagator.moments(inner)  # raises
    dense = joint(propagator, [node], source, weights)
    if dense is None:
        raise refuse(
            f"`{node.op}` of random {shapes(node.operands)}, which has no rule and a Jacobian of more "
            f"than {LARGEST} entries",
            node.source,
            register(node),
        )
    known = {}
    if source is not None:
        known[source] = propagator.moments(source).array().astype(source.dtype)
    (mean,) = compute([node], known, linearised=True)
    axes = _axes(propagator, node)
    index = np.arange(node.size).reshape(node.shape)
    cov = propagator.structure.project(as_sequence(dense, index, index, axes))
    propagator.note(node, "linearised", "weights independent of what they are applied to")
    return fresh(as_rows(mean, *axes), cov, node.shape, *axes)


def _tied(propagator: Propagator, node: Node) -> Moments | None:
    """Weights applied to arrays that depend on them: tied embeddings or projections, repeated layers."""
    if not propagator.tied or not (_knows_its_weights(node) or _shares_a_weight(node)):
        return None
    try:
        return _linearised(propagator, node)
    except PropagationError:
        propagator.note(
            node, "tied weights", "taken as independent: too large for a dense covariance"
        )
        return None


PATTERNS.insert(0, _tied)  # before attention, which assumes weights of its own


def _knows_its_weights(node: Node) -> bool:
    """Whether one operand is a weight that another depends on, such as a tied embedding."""
    own = {id(x.posterior) for x in node.operands if isinstance(x, Weight)}
    return bool(own) and any(own & weights_of(x, None).keys() for x in node.nodes)


def _shares_a_weight(node: Node) -> bool:
    """Whether a product's factors apply the same weight to one array: tied projections."""
    if node.op != "dot_general" or len(node.nodes) != 2:
        return False
    source = dominator(node.nodes, True)
    left, right = (weights_of(x, source) for x in node.nodes)
    return bool(left.keys() & right.keys())


def _axes(propagator: Propagator, node: Node) -> tuple[Axes, Axes]:
    """Token and feature axes; a product of two random arrays (attention) keeps those of its values."""
    features: tuple[int, ...] = (node.ndim - 1,) if node.ndim else ()
    if node.op == "dot_general" and all(map(is_random, node.operands)):
        # The values are computed before the attention weights.
        side = min((0, 1), key=lambda i: getattr(node.operands[i], "index", 0))
        by_feature = propagator.moments(node.operands[side]).natural()[1]
        left, right = factors(node)
        shown = [i if side == 0 else j for i, j in zip(left.batch, right.batch, strict=True)]
        shown += left.free if side == 0 else [-1] * len(left.free)
        shown += right.free if side == 1 else [-1] * len(right.free)
        features = tuple(i for i, axis in enumerate(shown) if axis in by_feature)
    return tuple(i for i in range(node.ndim) if i not in features), features


def dominator(roots: list[Node], tied: bool, users: list[Node] | None = None) -> Node | None:
    """The nearest array through which all random paths to the roots pass, or None.

    If any weights are tied, it shares none with what lies between it and the users (default: roots).
    """

    def fit(n: Node) -> bool:
        if not tied or not jnp.issubdtype(n.dtype, jnp.floating):
            return jnp.issubdtype(n.dtype, jnp.floating)
        before = weights_of(n, None).keys()
        return not any(weights_of(user, n).keys() & before for user in users or roots)

    return next(filter(fit, dominators(roots)), None)


def common(propagator: Propagator, a: Any, b: Any) -> Array | None:
    """Cov[a, b], (size of a, size of b), to first order in their common origin.

    The origin is their nearest common dominator and the weights that both depend on. None if there is
    none, or if it is too large for a dense covariance.
    """
    if not (isinstance(a, Node) and isinstance(b, Node)):
        return None
    source = dominator([a, b], propagator.tied)
    left, right = (weights_of(x, source) for x in (a, b))
    shared = {i: left[i] for i in left.keys() & right.keys()}
    found = joint(propagator, [a, b], source, shared)
    return None if found is None else found[: a.size, a.size :]


def cross_of(
    propagator: Propagator, node: Node, parts: str, axes: tuple[Axes, Axes]
) -> tuple[Array | None, str]:
    """`common` of two operands broadcast to the node, as sequences: (T, D, T, D); and `assumed`."""
    dense = common(propagator, *node.operands)
    text = assumed(parts, node.operands, dense is not None)
    if dense is None:
        return None, text
    rows, columns = (
        np.broadcast_to(np.arange(x.size).reshape(x.shape), node.shape) for x in node.operands
    )
    return as_sequence(dense, rows, columns, axes), text


def assumed(parts: str, operands: Any, known: bool) -> str:
    """The receipt's assumption about operands; `known` tells if their covariance is."""
    origins = [weights_of(x, None) for x in operands if isinstance(x, Node)]
    shared = any(a.keys() & b.keys() for a, b in itertools.combinations(origins, 2))
    if shared and not known:
        return f"{parts} independent: their common origin is too large for a dense covariance"
    return f"{parts} linearised in their common origin" if known else f"{parts} independent"


def joint(
    propagator: Propagator, roots: list[Node], source: Node | None, weights: dict[int, Posterior]
) -> Array | None:
    """Covariance of the roots' concatenated entries, (N, N); None without an origin or if too large."""
    if source is None and not weights:
        return None
    n = sum(root.size for root in roots)
    sizes = [n if source is None else source.size, *(w.mean.size for w in weights.values())]
    if n * max(n, *sizes) > LARGEST:
        return None
    keys: list[Any] = list(weights)
    start = [w.mean for w in weights.values()]
    if source is not None:
        moments = propagator.moments(source)
        keys, start = [*keys, source], [*start, moments.array()]

    def output(at: list[Array]) -> Array:
        known = dict(zip(keys, at, strict=True))
        if source is not None:
            known[source] = known[source].astype(source.dtype)
        return jnp.concatenate([x.ravel() for x in compute(roots, known, linearised=True)])

    jacobians = [j.reshape(n, -1) for j in jax.jacrev(output)(start)]
    total = jnp.zeros((n, n), jnp.result_type(*start))
    for w, jacobian in zip(weights.values(), jacobians, strict=False):
        total = total + carried(w, jacobian)
    if source is not None:
        total = (
            total + jacobians[-1] @ entries(moments.cov, moments.places.ravel()) @ jacobians[-1].T
        )
    return total


def as_sequence(
    dense: Array, rows: np.ndarray, columns: np.ndarray, axes: tuple[Axes, Axes]
) -> Array:
    """Covariance (T, D, T, D) of a result's entries, which lie at `rows` and `columns` of `dense`."""
    return dense[as_rows(rows, *axes)[:, :, None, None], as_rows(columns, *axes)]


def with_cross(cov: Any, cross: Array) -> Any:
    """The covariance plus `cross` (T, D, T, D) and its transpose, with variances kept non-negative."""
    t, d = cov.shape
    own = diagonal_of(cross.reshape(t * d, t * d)).reshape(t, d)
    if not isinstance(cov, Diagonal | Separable):
        return _with_shares(cov, cross, -2 * own)
    variance = jnp.maximum(cov.variance() + 2 * own, 0)
    if isinstance(cov, Diagonal):
        return Diagonal(variance)
    gram = jnp.einsum("tdsd->ts", cross)
    token_gram = cov.token_gram() + gram + gram.T
    ones = weighted(jnp.ones((t, 1), cross.dtype), cov.pool)[:, 0]
    features = jnp.einsum("t,tdse,s->de", ones, cross, ones)
    feature_gram = cov.feature_gram() + features + features.T
    return cov.from_crossed(variance, token_gram, feature_gram, cov.pool)


def _with_shares(cov: Any, cross: Array, owed: Array) -> Any:
    """`with_cross`, where less of it is added if the `owed` variance (T, D) is more than there is.

    Variances are to second order and `cross` to first, so the two need not be consistent.
    """
    left = safe_divide(cov.variance(), jnp.maximum(owed, 0))
    below = 1 - 8 * jnp.finfo(left.dtype).eps  # allow for rounding
    share = jnp.where(owed > cov.variance(), safe_sqrt(below * left), 1)
    cross = share[:, :, None, None] * cross * share[None, None]
    return type(cov).project(cov.to_dense() + cross + jnp.transpose(cross, (2, 3, 0, 1)))
