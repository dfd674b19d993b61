"""Dense covariances of arrays with a common origin, where no structured rule covers them."""

from __future__ import annotations

import itertools
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.covariance import Diagonal, Separable, TokenBlock, TokenCorrelated
from moment_jax.covariance.numerics import safe_divide, safe_sqrt, weighted
from moment_jax.posterior import Point, Posterior
from moment_jax.propagation.graph import Node
from moment_jax.propagation.linearisation import carried
from moment_jax.propagation.moments import Axes, Moments, as_rows
from moment_jax.propagation.primitives import evaluate
from moment_jax.propagation.weights import Weight
from moment_jax.xla import diagonal_of

Array = jax.Array
LARGEST = 2**24  # entries of a Jacobian


def dominator(roots: list[Node], tied: bool) -> Node | None:
    """The nearest array that all of the roots are made of, but for weights; None if there is none.

    Args:
      roots: one or more.
      tied: whether weights are used more than once: then one that knows none of those between.
    """
    frontier = set(roots)
    while len(frontier) > 1 or any(
        not _floating(n) or (tied and _tied(roots, n)) for n in frontier
    ):
        last = max(frontier, key=lambda n: n.index)
        frontier.remove(last)
        frontier.update(last.nodes)
    return next(iter(frontier), None)


def _tied(roots: list[Node], source: Node) -> bool:
    before = weights_of(source, None)
    return any(weights_of(root, source).keys() & before.keys() for root in roots)


def knows_its_weights(node: Node) -> bool:
    """Whether an operand is made of a weight that is an operand too, such as a tied embedding."""
    own = {id(x.posterior) for x in node.operands if isinstance(x, Weight)}
    return bool(own) and any(own & weights_of(x, None).keys() for x in node.nodes)


def share_a_weight(node: Node) -> bool:
    """Whether a product's two factors are made, from one array, by the same weight: tied projections."""
    if node.op != "dot_general" or len(node.nodes) != 2:
        return False
    source = dominator(node.nodes, True)
    left, right = (weights_of(x, source) for x in node.nodes)
    return bool(left.keys() & right.keys())


def _floating(node: Node) -> bool:
    return jnp.issubdtype(node.dtype, jnp.floating)


def weights_of(root: Node, source: Node | None) -> dict[int, Posterior]:
    """Beliefs that an array knows beside the source that it is made of."""
    weights = (x for node in between(root, source) for x in node.operands if isinstance(x, Weight))
    return {id(x.posterior): x.posterior for x in weights if not isinstance(x.posterior, Point)}


def between(root: Node, source: Node | None) -> set[Node]:
    """The nodes that an array is made of, up to the source."""
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
    """Arrays of the nodes, with elementwise functions by their expected gains where these are known.

    Args:
      roots: what is asked for.
      known: values of nodes, and of posteriors by their id.
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
    """All floating-point arrays in one type: beliefs and moments may be wider than the user's arrays."""
    arrays = [jnp.asarray(x) for x in operands]
    wide = [x.dtype for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    if len(set(wide)) < 2:
        return operands
    return [x.astype(jnp.result_type(*wide)) if x.dtype in wide else x for x in arrays]


def common(propagator: Any, a: Node, b: Node) -> Array | None:
    """Cov[a, b], (size of a, size of b), to first order in what both are made of.

    That is the nearest array from which both come, and the weights that both know. None if there is
    nothing of the kind, or if it is too large to be dense.
    """
    source = dominator([a, b], propagator.tied)
    left, right = (weights_of(x, source) for x in (a, b))
    shared = {i: left[i] for i in left.keys() & right.keys()}
    found = joint(propagator, [a, b], source, shared)
    return None if found is None else found[: a.size, a.size :]


def cross_of(propagator: Any, node: Node, sides: Any, tokens: Axes, features: Axes) -> Array | None:
    """`common` of two operands, repeated along axes of size one, as sequences: (T, D, T, D)."""
    a, b = sides
    if not (isinstance(a, Node) and isinstance(b, Node)):
        return None
    dense = common(propagator, a, b)
    if dense is None:
        return None
    rows, columns = (np.broadcast_to(np.arange(x.size).reshape(x.shape), node.shape) for x in sides)
    return as_sequence(dense, rows, columns, tokens, features)


def assumed(parts: str, operands: Any, known: bool) -> str:
    """What is assumed of operands, of whose covariance with each other this is known."""
    origins = [weights_of(x, None) for x in operands if isinstance(x, Node)]
    shared = any(a.keys() & b.keys() for a, b in itertools.combinations(origins, 2))
    if shared and not known:
        return f"{parts} independent though they have an origin in common, too large to be dense"
    return f"{parts} linearised in their common origin" if known else f"{parts} independent"


def joint(
    propagator: Any, roots: list[Node], source: Node | None, weights: dict[int, Posterior]
) -> Array | None:
    """Covariance of all entries of the roots, one after another, (N, N); None if it is too large."""
    if source is None and not weights:
        return None
    n = sum(root.size for root in roots)
    sizes = [n if source is None else source.size, *(w.mean.size for w in weights.values())]
    if n * max(n, *sizes) > LARGEST:
        return None
    start: dict[Any, Array] = {i: w.mean for i, w in weights.items()}
    moments = None if source is None else propagator.moments(source)
    if moments is not None:
        start[0] = moments.array()

    def output(at: dict[Any, Array]) -> Array:
        known: dict[Any, Array] = {**at}
        if source is not None:
            known[source] = known.pop(0).astype(source.dtype)
        return jnp.concatenate([x.reshape(-1) for x in values(roots, known)])

    jacobians = jax.jacrev(output)(start)
    total = jnp.zeros((n, n), jnp.result_type(*start.values()))
    for i, w in weights.items():
        total = total + carried(w, jacobians[i].reshape(n, -1))
    if moments is not None:
        jacobian = jacobians[0].reshape(n, -1)
        total = total + jacobian @ dense_of(moments) @ jacobian.T
    return total


def dense_of(m: Moments) -> Array:
    """Covariance of an array's entries in their order, (size, size)."""
    flat = m.places.ravel()
    size = m.mean.size
    dense = m.cov.to_dense().reshape(size, size)
    if not np.array_equal(flat, np.arange(size)):
        dense = dense[np.maximum(flat, 0)[:, None], np.maximum(flat, 0)[None]]
        dense = jnp.where((flat < 0)[:, None] | (flat < 0)[None], 0, dense)
    return dense


def as_sequence(
    dense: Array, rows: np.ndarray, columns: np.ndarray, tokens: Axes, features: Axes
) -> Array:
    """Covariance of two arrays' entries as one of sequences, (T, D, T, D).

    Args:
      dense: covariance of the entries, (size of a, size of b).
      rows: which entry of a each entry of the array shows.
      columns: the same of b.
      tokens: axes of the array.
      features: axes of the array.
    """
    r, c = (as_rows(x, tokens, features) for x in (rows, columns))
    return dense[r[:, :, None, None], c]


@singledispatch
def with_cross(cov: Any, cross: Array) -> Any:
    """The covariance plus this (T, D, T, D) array and its transpose, of variances never negative."""
    share = _share(cov, cross)
    cross = share[:, :, None, None] * cross * share[None, None]
    return type(cov).project(cov.to_dense() + cross + jnp.transpose(cross, (2, 3, 0, 1)))


@with_cross.register
def _block(cov: TokenBlock, cross: Array) -> TokenBlock:
    share = _share(cov, cross)
    own = share[:, :, None] * jnp.einsum("tdte->tde", cross) * share[:, None, :]
    return TokenBlock(cov.blocks + own + jnp.swapaxes(own, 1, 2))


def _share(cov: Any, cross: Array) -> Array:
    """What is taken of each entry, (T, D): less than 1 where cancelling would leave less than nothing.

    Addends to second order and their covariance to first need not fit each other.
    """
    owed = -2 * _own(cov, cross)
    left = safe_divide(cov.variance(), jnp.maximum(owed, 0))
    below = 1 - 8 * jnp.finfo(left.dtype).eps  # nor less than nothing by rounding
    return jnp.where(owed > cov.variance(), safe_sqrt(below * left), 1)


def _own(cov: Any, cross: Array) -> Array:
    """Every entry's with itself, (T, D)."""
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
