"""Dense covariances of arrays with a common origin, for cases without a structured rule."""

import itertools
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Diagonal, Separable, TokenBlock, TokenCorrelated
from moment_jax.covariance.numerics import safe_divide, safe_sqrt, weighted
from moment_jax.posterior import Point, Posterior
from moment_jax.propagation.graph import Node
from moment_jax.propagation.linearisation import carried
from moment_jax.propagation.moments import Axes, as_rows, entries
from moment_jax.propagation.primitives import evaluate
from moment_jax.propagation.weights import Weight
from moment_jax.xla import diagonal_of

LARGEST = 2**24  # most entries of a Jacobian


def dominator(roots: list[Node], tied: bool, users: list[Node] | None = None) -> Node | None:
    """The nearest array through which all random paths to the roots pass, or None.

    If any weights are tied, it shares none with what lies between it and the users (default: roots).
    """

    def unfit(n: Node) -> bool:
        if not jnp.issubdtype(n.dtype, jnp.floating):
            return True
        before = weights_of(n, None).keys() if tied else set()
        return tied and any(weights_of(user, n).keys() & before for user in users or roots)

    frontier = set(roots)
    while len(frontier) > 1 or any(map(unfit, frontier)):
        last = max(frontier, key=lambda n: n.index)
        frontier.remove(last)
        frontier.update(last.nodes)
    return next(iter(frontier), None)


def weights_of(root: Node, source: Node | None) -> dict[int, Posterior]:
    """Beliefs, by id, that an array depends on other than through `source`."""
    weights = (x for node in between(root, source) for x in node.operands if isinstance(x, Weight))
    return {id(x.posterior): x.posterior for x in weights if not isinstance(x.posterior, Point)}


def between(root: Node, source: Node | None) -> set[Node]:
    """The nodes that an array depends on, down to but without the source."""
    seen: set[Node] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node is source or node in seen:
            continue
        seen.add(node)
        stack.extend(node.nodes)
    return seen


def values(roots: list[Node], known: dict[Any, Array]) -> list[Array]:
    """Values of the roots, elementwise functions being replaced by their expected linear maps.

    `known` has values of nodes, and of posteriors by id.
    """
    memory = dict(known)

    def value(x: Any) -> Any:
        if isinstance(x, Weight):
            return known.get(id(x.posterior), x.posterior.mean).reshape(-1)[x.places]
        if not isinstance(x, Node):
            return x
        if x not in memory:
            if x.op == "belief":
                memory[x] = value(x.operands[0])
            elif x.line is not None:
                source, before, gain, after = x.line
                memory[x] = (after + gain * (value(source) - before)).astype(x.dtype)
            else:
                operands = _alike([value(y) for y in x.operands])
                result = evaluate(x.primitive, operands, x.params)[x.output]
                memory[x] = result.astype(x.dtype)
        return memory[x]

    return [value(x) for x in roots]


def _alike(operands: list[Any]) -> list[Any]:
    """Promote floating-point operands to a common dtype: moments may be wider than the user's arrays."""
    arrays = [jnp.asarray(x) for x in operands]
    wide = [x.dtype for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    if len(set(wide)) < 2:
        return operands
    return [x.astype(jnp.result_type(*wide)) if x.dtype in wide else x for x in arrays]


def common(propagator: Any, a: Any, b: Any) -> Array | None:
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
    propagator: Any, node: Node, parts: str, axes: tuple[Axes, Axes]
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
    propagator: Any, roots: list[Node], source: Node | None, weights: dict[int, Posterior]
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
        return jnp.concatenate([x.reshape(-1) for x in values(roots, known)])

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


@singledispatch
def with_cross(cov: Any, cross: Array) -> Any:
    """The covariance plus `cross` (T, D, T, D) and its transpose, with variances kept non-negative."""
    share = _share(cov, cross)
    cross = share[:, :, None, None] * cross * share[None, None]
    return type(cov).project(cov.to_dense() + cross + jnp.transpose(cross, (2, 3, 0, 1)))


@with_cross.register
def _block(cov: TokenBlock, cross: Array) -> TokenBlock:
    share = _share(cov, cross)
    own = share[:, :, None] * jnp.einsum("tdte->tde", cross) * share[:, None, :]
    return TokenBlock(cov.blocks + own + jnp.swapaxes(own, 1, 2))


def _share(cov: Any, cross: Array) -> Array:
    """A factor for each entry of `cross`, (T, D), below 1 where a variance would become negative.

    Variances are to second order and `cross` to first, so the two need not be consistent.
    """
    owed = -2 * _own(cov, cross)
    left = safe_divide(cov.variance(), jnp.maximum(owed, 0))
    below = 1 - 8 * jnp.finfo(left.dtype).eps  # allow for rounding
    return jnp.where(owed > cov.variance(), safe_sqrt(below * left), 1)


def _own(cov: Any, cross: Array) -> Array:
    """The diagonal of `cross`, (T, D)."""
    t, d = cov.shape
    return diagonal_of(cross.reshape(t * d, t * d)).reshape(t, d)


def _variance(cov: Any, cross: Array) -> Array:
    return jnp.maximum(cov.variance() + 2 * _own(cov, cross), 0)


@with_cross.register
def _diagonal(cov: Diagonal, cross: Array) -> Diagonal:
    return Diagonal(_variance(cov, cross))


@with_cross.register
def _tokens(cov: TokenCorrelated, cross: Array) -> TokenCorrelated:
    gram = jnp.einsum("tdsd->ts", cross)
    return TokenCorrelated.from_moments(_variance(cov, cross), cov.token_gram() + gram + gram.T)


@with_cross.register
def _separable(cov: Separable, cross: Array) -> Separable:
    gram = jnp.einsum("tdsd->ts", cross)
    ones = weighted(jnp.ones((cov.shape[0], 1), cross.dtype), cov.pool)[:, 0]
    features = jnp.einsum("t,tdse,s->de", ones, cross, ones)
    return cov.from_crossed(
        _variance(cov, cross),
        cov.token_gram() + gram + gram.T,
        cov.feature_gram() + features + features.T,
        cov.pool,
    )
