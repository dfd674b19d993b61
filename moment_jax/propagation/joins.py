"""Operations that move, add or multiply entries of arrays, and the covariances of those that meet.

Each `Base` knows of what it is made, and how it carries covariances with that. So Cov[u, v] is found by
walking back: it is what the later one of the two makes of Cov[u, its parents]. The walk ends where both
are one array, or have no weight in common.
"""

import itertools
import math
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.base import plus
from moment_jax.posterior import Point, Posterior
from moment_jax.propagation import arrays, primitives
from moment_jax.propagation.arrays import Base, Carry, Moments, Places, Sequence
from moment_jax.propagation.dense import readings
from moment_jax.propagation.errors import LINEARISE, refuse, register, shapes, where
from moment_jax.propagation.graph import Node, is_random, weights_in
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.regions import weights_of
from moment_jax.propagation.weights import Weight, overlap, select

Gain = Array | int  # (T, D), or 1 or -1


def covariance(propagator: Propagator, node: Node, a: Sequence, b: Sequence) -> Any:
    """Cov[a, b] in the structure's own form, where `node` joins them; None if it is zero."""
    found = _arranged(node, _between(propagator, node, a.base, b.base), b)
    found = None if found is None else _arranged(node, found.T, a)
    return None if found is None else found.T


def dependent(propagator: Propagator, node: Node, parts: list[Sequence]) -> bool:
    """Whether any two of the sequences depend on each other; raises where no walk can tell how."""
    pairs = itertools.combinations(parts, 2)
    return sum(_related(propagator, node, a.base, b.base) for a, b in pairs) > 0  # asks all


def combined(
    propagator: Propagator, node: Node, parts: list[Sequence], gains: list[Any] | None = None,
    means: Any = None,
) -> tuple[Base, bool]:  # fmt: skip
    """The sum of sequences of one shape, each times its gain, with all their covariances.

    And whether they have any. `means` makes another mean of theirs.
    """
    gains = gains or [1] * len(parts)

    def compute() -> tuple[Any, ...]:
        each: list[Array] = []
        cov = None
        for i, (x, gain) in enumerate(zip(parts, gains, strict=True)):
            found = (covariance(propagator, node, y, x) for y in parts[:i])
            crosses = (_times(p, gain, c) for p, c in zip(gains, found, strict=False))
            cross = reduce(plus, crosses, None)
            signed = isinstance(gain, int)
            each.append(x.mean if signed and gain == 1 else gain * x.mean)
            own = x.cov if signed else x.cov.rescale(gain)
            cov = own if cov is None else cov.add_branch(own, cross)
        mean = sum(each[1:], each[0])
        return mean if means is None else means(mean), cov, *(partial(_times, 1, g) for g in gains)

    known = dependent(propagator, node, parts)
    return Base(parts[0].shape, compute, tuple(parts)), known


def _times(p: Gain, q: Gain, cross: Any) -> Any:
    """Cov[p a, q b], given Cov[a, b]."""
    if cross is None or (isinstance(p, int) and isinstance(q, int) and p * q == 1):
        return cross
    if isinstance(p, int):  # 1, or both are
        return cross.rescale(jnp.full((1, 1), p * q) if isinstance(q, int) else q)
    return cross.rescale(q).T.rescale(p).T


def _between(propagator: Propagator, node: Node, u: Base, v: Base) -> Any:
    """Cov[u, v]."""
    if u.index > v.index:
        found = _between(propagator, node, v, u)
        return None if found is None else found.T
    if u is v:
        return v.numbers[1].with_itself()
    if not _related(propagator, node, u, v):
        return None
    if (u, v) not in propagator.crosses:
        total = None
        for x, carry in zip(v.parents or (), v.numbers[2], strict=True):
            given = _arranged(node, _between(propagator, node, u, x.base), x)
            total = plus(total, None if given is None else carry(given))
        propagator.crosses[u, v] = total
    return propagator.crosses[u, v]


def _related(propagator: Propagator, node: Node, u: Base, v: Base) -> bool:
    """Whether two arrays share weights; raises where no walk can tell their covariance."""
    if u.index > v.index:
        u, v = v, u
    mine = weights_in(u.node)
    if u is v or not overlap(mine, weights_in(v.node)):
        return u is v
    if (u, v) not in propagator.related:
        if v.parents is None:
            fix = f'Give its rule a carry: mj.propagation_rule("{v.node.op}", carry=...). '
            raise _shared(node, v, "no rule tells how it depends on what came before", fix)
        if overlap(_own(propagator, v), mine):
            batch = "One call on both inputs, as a batch jnp.stack([a, b]), uses them once. "
            raise _shared(node, v, "both use the same weights", batch)
        propagator.related.add((u, v))
        for x in v.parents:
            _related(propagator, node, u, x.base)
    return True


def _own(propagator: Propagator, v: Base) -> list[Any]:
    """The weights between an array and its parents."""
    if not isinstance(v.node, Node):
        return [v.node]
    parents = {x.base for x in v.parents or ()}

    def before(node: Node) -> list[Node]:
        known = propagator.planned
        return [n for n in node.origins if n not in known or known[n].base not in parents]

    return weights_of(v.node, {base.node for base in parents}, before)


def _arranged(node: Node, cross: Any, x: Sequence) -> Any:
    """Cov[u, x], given that of u and the base of x; None is zero."""
    found = None if cross is None else x.arranged(cross)
    if cross is not None and found is None:
        raise refuse(
            f"`{node.op}` of two arrays with a random array in common, of which one was rearranged "
            f"so that its tokens and features {tuple(x.base.shape)} are mixed",
            node.source,
            f"Use structure=mj.Full. {register(node)}",
        )
    return found


def _shared(node: Node, v: Base, why: str, fix: str) -> Exception:
    place = f" (one from {where(v.node.source)}: {why})" if isinstance(v.node, Node) else ""
    return refuse(
        f"`{node.op}` of random {shapes(node.operands)}, which have a random array in common{place}",
        node.source,
        f"{fix}Else keep one of them certain, or {LINEARISE}.",
    )


def _aligned(propagator: Propagator, node: Node, *operands: Any) -> list[Sequence]:
    """Operands as sequences of one shape, with the axes of the largest."""
    found = [propagator.moments(x).broadcast(node.shape) for x in operands]
    axes = max(found, key=lambda m: math.prod(m.base.shape)).natural()
    return [m.sequence(*axes) for m in found]


@rule("mul")
def _product(propagator: Propagator, node: Node) -> Moments | None:
    """Moments to second order in the noise."""
    if not all(map(is_random, node.operands)):
        return None
    a, b = _aligned(propagator, node, *node.operands)
    apart = not dependent(propagator, node, [a, b])

    def compute() -> tuple[Any, ...]:
        cross, mean = covariance(propagator, node, a, b), a.mean * b.mean
        cov = a.cov.rescale(b.mean).add_branch(b.cov.rescale(a.mean), _times(b.mean, a.mean, cross))
        mean = mean if cross is None else mean + cross.own()
        cov = cov.add(a.cov.hadamard(b.cov, cross))
        return mean, cov, partial(_times, 1, b.mean), partial(_times, 1, a.mean)

    propagator.note(node, "product", "factors " + ("independent" if apart else "jointly Gaussian"))
    return arrays.made(compute, a.shape, arrays.ordered(node.shape, *a.axes), a, b)


@rule("select_n")
def _chosen(propagator: Propagator, node: Node) -> Moments | None:
    """By a certain condition that is not known while tracing."""
    condition, *cases = node.operands
    if is_random(condition) or len(cases) != 2 or np.shape(condition) != tuple(node.shape):
        return None
    a, b = _aligned(propagator, node, *cases[::-1])
    chosen = arrays.as_rows(condition, *a.axes)
    p = chosen.astype(a.dtype)

    def means(_: Array) -> Array:
        return jnp.where(chosen, a.mean, b.mean)  # the other may be infinite

    found, _ = combined(propagator, node, [a, b], [p, 1 - p], means)
    propagator.note(node, "select_n", "operands jointly Gaussian")
    return Moments(found, arrays.ordered(node.shape, *a.axes))


@rule("add", "add_any", "sub")
def _sum(propagator: Propagator, node: Node) -> Moments | None:
    """The sum or difference of two arrays, with the covariance of both."""
    parts = _aligned(propagator, node, *node.operands)
    gains = [1, -1 if node.op == "sub" else 1]
    if parts[0].base.index > parts[1].base.index:  # the stream before its branch
        parts, gains = parts[::-1], gains[::-1]
    found, shared = combined(propagator, node, parts, gains)
    notes = ("residual", "the branch linearised") if shared else ("sum", "addends independent")
    propagator.note(node, *notes)
    return Moments(found, arrays.ordered(node.shape, *parts[0].axes))


@rule(*primitives.VIEWS)
def _view(propagator: Propagator, node: Node) -> Moments | None:
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
    places = primitives.moved(node, m.places, rest)
    return None if places is None else Moments(m.base, places[node.output])


@rule("belief")
def _belief(propagator: Propagator, node: Node) -> Moments:
    propagator.note(node, "weights as values")
    return propagator.moments(node.operands[0])


@rule("reduce_sum")
def _total(propagator: Propagator, node: Node) -> Moments | None:
    """The sum over tokens, or over features."""
    m = propagator.moments(node.operands[0])
    x = m.sequence()
    axes = node.params["axes"]
    over = next((g for g in x.axes if all(i in g or m.shape[i] == 1 for i in axes)), None)
    if over is None:
        return None
    # The entry of the sum in which each token, or each feature, is.
    entry = arrays.numbered([1 if i in axes else m.shape[i] for i in over])
    entry = np.broadcast_to(entry, [m.shape[i] for i in over])
    by_token, count, (t, d) = over is x.tokens, int(entry.max()) + 1, x.shape

    def compute() -> tuple[Any, ...]:
        choose = jax.nn.one_hot(entry.ravel(), count, dtype=x.mean.dtype)  # (old, new)

        def summed(of: Any) -> Any:
            return of.map_tokens(choose.T) if by_token else of.map_features(choose)

        mean = choose.T @ x.mean if by_token else x.mean @ choose
        return mean, summed(x.cov), summed

    propagator.note(node, "sum over " + ("tokens" if by_token else "features"))
    left = [i for i in range(m.ndim) if i not in axes]
    kept = (tuple(left.index(i) for i in g if i not in axes) for g in x.axes)
    shape = (count, d) if by_token else (t, count)
    return arrays.made(compute, shape, arrays.ordered(node.shape, *kept), x)


_DATA = {  # the operands that are not indices or conditions
    "concatenate": (0, None), "pad": (0, 2), "dynamic_update_slice": (0, 2), "select_n": (1, None),
}  # fmt: skip


@rule(*_DATA)
def _assembled(propagator: Propagator, node: Node) -> Moments | None:
    """The sum of the operands, each at its own entries and zero elsewhere."""
    data = slice(*_DATA[node.op])
    parts = node.operands[data]
    before, after = node.operands[: data.start], node.operands[data.start + len(parts) :]
    if not all(map(primitives.is_known, (*before, *after))):
        return None
    moments = [propagator.moments(x) for x in parts]
    # Number the entries of all parts, to see where they go.
    ends = np.cumsum([m.places.size for m in moments])
    ids = [
        arrays.numbered(m.shape).astype(np.int32) + (end - m.places.size)
        for m, end in zip(moments, ends, strict=True)
    ]
    shown = np.asarray(primitives.evaluate(node.primitive, [*before, *ids, *after], node.params)[0])

    # Where each entry is in its array; parts of one array are one part.
    known: list[tuple[Moments, Places]] = []
    whole: dict[Base, Places] = {}
    for x, m, end in zip(parts, moments, ends, strict=True):
        if m.places.size == 0:
            continue
        own = (shown >= end - m.places.size) & (shown < end)
        places = np.append(m.places, -1)[np.where(own, shown - end - 1, -1)]
        if is_random(x):
            whole[m.base] = np.maximum(places, whole.get(m.base, -1))
        else:
            known.append((m, places))
    found = [Moments(base, places) for base, places in whole.items()]
    if len(found) == 1 and not known and (found[0].places >= 0).all():
        return found[0]
    random = (m for x, m in zip(parts, moments, strict=True) if is_random(x))
    tokens, features = max(random, key=lambda m: m.places.size).natural()
    left = [i for i, n in enumerate(node.shape) if n > 1 and i not in (*tokens, *features)]
    features = features or tuple(left)
    tokens = tuple(sorted({*tokens, *left} - {*features}))

    def means(mean: Array) -> Array:
        certain = (arrays.take(m.base.numbers[0], places) for m, places in known)
        return mean + sum(arrays.as_rows(x, tokens, features) for x in certain)

    sequences = [m.sequence(tokens, features) for m in found]
    total, _ = combined(propagator, node, sequences, means=means)
    propagator.note(node, node.op)
    return Moments(total, arrays.ordered(node.shape, tokens, features))


@rule("dot_general")
def _over_tokens(propagator: Propagator, node: Node) -> Moments | None:
    """A kernel over the tokens, the same for all features, or a certain one for each group of them."""
    for side, value, weight, own, other in readings(node):
        m = propagator.moments(value)
        features = m.natural()[1]
        heads = tuple(i for i in own.batch if m.shape[i] > 1)
        if set(own.contracted) & set(features) or not set(heads) <= set(features):
            continue
        known = isinstance(weight.posterior, Point)
        rest = tuple(i for i in own.free if i not in features)  # further axes of tokens
        count = math.prod(m.shape[i] for i in rest)
        places = arrays.as_rows(weight.places, other.batch, other.contracted, other.free)
        kernels: list[Any] = [select(weight.posterior, each) for each in places]
        if None in kernels or (not known and (heads or count > 1)):
            return None
        features = (*heads, *(i for i in features if i not in heads))
        x = m.sequence((*rest, *own.contracted), features)
        # The result has the axes of the batch, of the value and of the kernel, in this order.
        sizes = *(m.shape[i] for i in rest), places.shape[2], *(m.shape[i] for i in features)
        axes = (*rest, -1, *features)
        entries = arrays.numbered(sizes).transpose([axes.index(i) for i in (*heads, *own.free, -1)])
        propagator.note(node, "tokens mixed", "" if known else "input and kernel independent")
        shape, mixed = (count * places.shape[2], x.shape[1]), []
        for k, columns in zip(kernels, np.split(np.arange(x.shape[1]), len(kernels)), strict=True):
            order = np.full(x.shape, -1)
            order[:, columns] = x.order[:, columns]
            part = x.base.at(order)
            compute = partial(_mixed, part, k, count)
            base = Base(shape, compute, (part,), node, propagator.finished)
            mixed.append(base.at(arrays.numbered(shape)))
        base = mixed[0].base if len(mixed) == 1 else combined(propagator, node, mixed)[0]
        return Moments(base, arrays.in_product(node, side, entries))
    return None


def _mixed(x: Sequence, kernel: Posterior, count: int) -> tuple[Array, Any, Carry]:
    """Moments of W^T x, W of shape (T, U), of each of `count` parts of the tokens."""
    mapping = kernel.mean.T
    if count > 1:
        mapping = jnp.kron(jnp.eye(count, dtype=mapping.dtype), mapping)
    mean, cov = mapping @ x.mean, x.cov.map_tokens(mapping)
    if not isinstance(kernel, Point):
        cov = cov.add(x.cov.token_noise(x.mean, kernel))
    return mean, cov, lambda cross: cross.map_tokens(mapping)
