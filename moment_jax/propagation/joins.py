"""Operations that move, add or multiply entries of arrays, and the covariances of those that meet.

Each `Base` knows of what it is made, and how it carries covariances with that. So Cov[u, v] is found by
walking back: it is what the later one of the two makes of Cov[u, its parents]. The walk ends where both
are one array, or have no weight in common.
"""

import dataclasses
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.cross import plus
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.expectations import ElementwiseMoments
from moment_jax.propagation import arrays
from moment_jax.propagation.errors import refuse, register, shapes, where
from moment_jax.propagation.graph import Node, is_random, weights_in
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.regions import weights_of
from moment_jax.propagation.weights import Weight, overlap


def covariance(propagator: Propagator, node: Node, a: arrays.Sequence, b: arrays.Sequence) -> Any:
    """Cov[a, b] in the structure's own form, where `node` joins them; None if it is zero."""
    found = _between(propagator, node, a.base, b.base)
    found = _arranged(node, found, b)
    if found is not None:
        found = _arranged(node, found.T, a)
    return None if found is None else found.T


def joined(propagator: Propagator, node: Node, parts: list[arrays.Sequence]) -> arrays.Base:
    """The sum of sequences of one shape, with all their covariances."""
    mean, cov = parts[0].mean, parts[0].cov
    for i, x in enumerate(parts[1:], 1):
        crosses = (covariance(propagator, node, y, x) for y in parts[:i])
        mean, cov = mean + x.mean, cov.add_branch(x.cov, reduce(plus, crosses, None))
    return arrays.Base(mean, cov, tuple((x, arrays.as_it_is) for x in parts))


def _between(propagator: Propagator, node: Node, u: arrays.Base, v: arrays.Base) -> Any:
    if u.index > v.index:
        found = _between(propagator, node, v, u)
        return None if found is None else found.T
    if u is v:
        return v.cov.with_itself()
    mine, others = weights_in(u.node), weights_in(v.node)
    if not overlap(mine, others):
        return None
    if (u, v) not in propagator.crosses:
        if v.parents is None:
            raise _shared(node, v, "no rule tells how it depends on what came before", "")
        if overlap(_own(v), mine):
            batch = "One call on both inputs, as a batch jnp.stack([a, b]), uses them once. "
            raise _shared(node, v, "both use the same weights", batch)
        total = None
        for x, carry in v.parents:
            given = _arranged(node, _between(propagator, node, u, x.base), x)
            total = plus(total, None if given is None else carry(given))
        propagator.crosses[u, v] = total
    return propagator.crosses[u, v]


def _own(v: arrays.Base) -> list[Any]:
    """The weights between an array and its parents."""
    if not isinstance(v.node, Node):
        return [v.node]
    parents = {x.base for x, _ in v.parents or ()}
    starts = {base.node for base in parents}

    def before(node: Node) -> list[Node]:
        return [n for n in node.origins if n.moments is None or n.moments.base not in parents]

    return weights_of(v.node, starts, before)


def _arranged(node: Node, cross: Any, x: arrays.Sequence) -> Any:
    if cross is None:
        return None
    found = x.arranged(cross)
    if found is None:
        raise refuse(
            f"`{node.op}` of two arrays with a random array in common, of which one was rearranged "
            f"so that its tokens and features {tuple(x.base.mean.shape)} are mixed",
            node.source,
            f"Use structure=mj.Full. {register(node)}",
        )
    return found


def _shared(node: Node, v: arrays.Base, why: str, fix: str) -> Exception:
    place = f" (one from {where(v.node.source)}: {why})" if isinstance(v.node, Node) else ""
    return refuse(
        f"`{node.op}` of random {shapes(node.operands)}, which have a random array in common{place}",
        node.source,
        f"No rule or pattern covers it. {fix}{register(node)}",
    )


class _Pair(NamedTuple):
    """Two jointly Gaussian arrays as sequences."""

    a: arrays.Sequence
    b: arrays.Sequence
    cross: Any  # Cov[a, b]
    axes: tuple[arrays.Axes, arrays.Axes]
    shape: tuple[int, ...]

    def weighted(self, p: Any, q: Any) -> Any:
        """The covariance of p a + q b, p and q (T, D)."""
        cross = self.cross
        if cross is not None:
            cross = cross.rescale(q).T.rescale(p).T
        return self.a.cov.rescale(p).add_branch(self.b.cov.rescale(q), cross)

    def result(self, mean: Array, cov: Any, p: Array, q: Array) -> arrays.Moments:
        """An array that is p a + q b to first order."""
        parents = (self.a, lambda c: c.rescale(p)), (self.b, lambda c: c.rescale(q))
        return arrays.fresh(mean, cov, self.shape, *self.axes, parents)


def _pair(propagator: Propagator, node: Node, shape: Any, *operands: arrays.Moments) -> _Pair:
    m, other = (x.broadcast(shape) for x in operands)
    axes = max(m, other, key=lambda x: x.mean.size).natural()
    a, b = m.sequence(*axes), other.sequence(*axes)
    return _Pair(a, b, covariance(propagator, node, a, b), axes, tuple(shape))


def _operands(propagator: Propagator, node: Node) -> _Pair:
    """Those of an operation on two arrays."""
    return _pair(propagator, node, node.shape, *map(propagator.moments, node.operands))


@rule("mul", "div")
def _product(propagator: Propagator, node: Node) -> arrays.Moments | None:
    """Moments to second order in the noise; a quotient is a product with the reciprocal's moments."""
    if not all(map(is_random, node.operands)):
        return None
    pair = _operands(propagator, node)
    a, b, cross, *_ = pair
    other, other_cov, slope = b.mean, b.cov, jnp.ones_like(b.mean)
    if node.op == "div":
        moments = _reciprocal(b.mean, b.cov.variance())
        other, other_cov, slope = moments.mean, b.cov.elementwise(moments), moments.gain
        cross = None if cross is None else cross.rescale(slope)
    mean = a.mean * other if cross is None else a.mean * other + cross.own()
    cov = pair._replace(b=dataclasses.replace(b, cov=other_cov), cross=cross).weighted(
        other, a.mean
    )
    cov = cov.add(a.cov.hadamard(other_cov, cross))
    assumed = "factors independent" if cross is None else "factors jointly Gaussian"
    if node.op == "div":
        assumed += ", the divisor of one sign"
    propagator.note(node, "product" if node.op == "mul" else "quotient", assumed)
    return pair.result(mean, cov, other, a.mean * slope)


def _reciprocal(mean: Array, variance: Array) -> ElementwiseMoments:
    """Moments of 1 / x for an x that keeps its sign, log-normal: those of a Gaussian are infinite.

    NaN where x is within two sd of zero, and may change its sign.
    """
    inverse = 1 / mean
    relative = variance * inverse**2
    out = jnp.where(relative < 0.25, inverse * (1 + relative), jnp.nan)
    rest = safe_sqrt(relative * (out**2 - inverse**2))
    return ElementwiseMoments(out, relative * out**2, -(inverse**2), rest)


@rule("select_n")
def _chosen(propagator: Propagator, node: Node) -> arrays.Moments | None:
    """By a certain condition that is not known while tracing."""
    condition, *cases = node.operands
    if is_random(condition) or len(cases) != 2 or np.shape(condition) != tuple(node.shape):
        return None
    pair = _pair(propagator, node, node.shape, *map(propagator.moments, cases[::-1]))
    chosen = arrays.as_rows(condition, *pair.axes)
    p = chosen.astype(pair.a.mean.dtype)
    propagator.note(node, "select_n", "operands jointly Gaussian")
    return pair.result(
        jnp.where(chosen, pair.a.mean, pair.b.mean), pair.weighted(p, 1 - p), p, 1 - p
    )


@rule(*arrays.VIEWS)
def _view(propagator: Propagator, node: Node) -> arrays.Moments | None:
    first, *rest = node.operands
    if any(map(is_random, rest)):
        raise refuse(
            f"`{node.op}` at a random index",
            node.source,
            "Indices must be static: compute them from certain values.",
        )
    if node.op == "gather" and isinstance(first, Weight) and first.ndim == 2:
        return None  # embedding lookup
    m = propagator.moments(first)
    places = arrays.moved(node, m.places, rest)
    return None if places is None else arrays.Moments(m.base, places[node.output])


@rule("belief")
def _belief(propagator: Propagator, node: Node) -> arrays.Moments:
    propagator.note(node, "weights as values")
    return propagator.moments(node.operands[0])


@rule("add", "add_any", "sub")
def _sum(propagator: Propagator, node: Node) -> arrays.Moments | None:
    """The sum or difference of two arrays, with the covariance of both."""
    moments = [propagator.moments(x).broadcast(node.shape) for x in node.operands]
    axes = max(moments, key=lambda m: m.mean.size).natural()
    a, b = sorted((m.sequence(*axes) for m in moments), key=lambda x: x.base.index)
    signs = (1, 1) if node.op != "sub" else (1, -1) if a.base is moments[0].base else (-1, 1)
    cross = covariance(propagator, node, a, b)
    if cross is not None and node.op == "sub":
        cross = cross.rescale(-jnp.ones((1, a.mean.shape[1]), a.mean.dtype))
    assumed = "addends independent" if cross is None else "the branch linearised"
    propagator.note(node, "sum" if cross is None else "residual", assumed)
    mean, cov = signs[0] * a.mean + signs[1] * b.mean, a.cov.add_branch(b.cov, cross)
    parents = tuple((x, partial(_signed, sign)) for x, sign in zip((a, b), signs, strict=True))
    return arrays.fresh(mean, cov, node.shape, *axes, parents)


def _signed(sign: int, cross: Any) -> Any:
    return cross if sign == 1 else cross.rescale(-jnp.ones((1, 1)))


@rule("reduce_sum")
def _total(propagator: Propagator, node: Node) -> arrays.Moments | None:
    """The sum over tokens, or over features."""
    m = propagator.moments(node.operands[0])
    x = m.sequence()
    axes = node.params["axes"]
    over = next((g for g in x.axes if all(i in g or m.shape[i] == 1 for i in axes)), None)
    if over is None:
        return None
    # The entry of the sum in which each token, or each feature, is.
    summed = [1 if i in axes else m.shape[i] for i in over]
    entry = np.arange(np.prod(summed, dtype=int)).reshape(summed)
    entry = np.broadcast_to(entry, [m.shape[i] for i in over])
    choose = jax.nn.one_hot(entry.ravel(), entry.max() + 1, dtype=x.mean.dtype)  # (old, new)
    by_token = over is x.tokens
    if by_token:
        mean, cov = choose.T @ x.mean, x.cov.map_tokens(choose.T)
    else:
        mean, cov = x.mean @ choose, x.cov.map_features(choose)

    def carry(cross: Any) -> Any:
        return cross.map_tokens(choose.T) if by_token else cross.map_features(choose)

    propagator.note(node, "sum over " + ("tokens" if by_token else "features"))
    left = [i for i in range(m.ndim) if i not in axes]
    tokens, features = (tuple(left.index(i) for i in g if i not in axes) for g in x.axes)
    return arrays.fresh(mean, cov, node.shape, tokens, features, ((x, carry),))


_DATA = {  # the operands that are not indices or conditions
    "concatenate": (0, None), "pad": (0, 2), "dynamic_update_slice": (0, 2), "select_n": (1, None),
}  # fmt: skip


@rule(*_DATA)
def _assembled(propagator: Propagator, node: Node) -> arrays.Moments | None:
    """The sum of the operands, each at its own entries and zero elsewhere."""
    data = range(len(node.operands))[slice(*_DATA[node.op])]
    parts = [node.operands[i] for i in data]
    others = (x for i, x in enumerate(node.operands) if i not in data)
    if not all(map(arrays.is_known, others)):
        return None
    moments = [propagator.moments(x) for x in parts]
    # Number the entries of all parts, to see where they go.
    ends = np.cumsum([m.places.size for m in moments])
    numbers = (np.arange(e - m.places.size, e) for m, e in zip(moments, ends, strict=True))
    ids = [n.astype(np.int32).reshape(m.shape) for n, m in zip(numbers, moments, strict=True)]
    operands = [*node.operands[: data.start], *ids, *node.operands[data.stop :]]
    shown = np.asarray(arrays.evaluate(node.primitive, operands, node.params)[0])

    # Where each entry is in its array; parts of one array are one part.
    mean: Any = jnp.zeros((), moments[0].mean.dtype)
    whole: dict[arrays.Base, np.ndarray] = {}
    for x, m, end in zip(parts, moments, ends, strict=True):
        if m.places.size == 0:
            continue
        local = np.where(shown < end, shown - end, 0)  # from the end: negative
        places = np.append(m.places, -1)[np.where(-local <= m.places.size, local - 1, -1)]
        if is_random(x):
            whole[m.base] = np.maximum(places, whole.get(m.base, -1))
        else:
            mean = mean + arrays.taken(m.mean, places)
    found = [arrays.Moments(base, places) for base, places in whole.items()]
    if len(found) == 1 and mean.ndim == 0 and (found[0].places >= 0).all():
        return found[0]
    random = (m for x, m in zip(parts, moments, strict=True) if is_random(x))
    tokens, features = max(random, key=lambda m: m.places.size).natural()
    left = [i for i, n in enumerate(node.shape) if n > 1 and i not in (*tokens, *features)]
    tokens, features = (tokens, features) if features else (tokens, tuple(left))
    tokens = tuple(sorted({*tokens, *left} - {*features}))
    total = joined(propagator, node, [m.sequence(tokens, features) for m in found])
    if mean.ndim:  # of the certain parts
        total.mean = total.mean + arrays.as_rows(mean, tokens, features)
    propagator.note(node, node.op)
    return arrays.Moments(total, arrays.ordered(node.shape, tokens, features))
