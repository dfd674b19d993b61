"""Operations that move or add entries: views, sums, concatenation, assembly."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Separable
from moment_jax.layers.blocks import residual
from moment_jax.propagation.branches import Branch
from moment_jax.propagation.errors import refuse
from moment_jax.propagation.graph import Node, independent, is_random
from moment_jax.propagation.moments import Moments, Sequence, as_rows, fresh, gather, taken
from moment_jax.propagation.primitives import VIEWS, evaluate, is_known, moved
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.regions import fork
from moment_jax.propagation.weights import Weight


@rule(*VIEWS)
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
    places = moved(node, m.places, rest)
    return None if places is None else Moments(m.mean, m.cov, places[node.output], m.branches)


@rule("belief")
def _belief(propagator: Propagator, node: Node) -> Moments:
    propagator.note(node, "weights as values")
    return propagator.moments(node.operands[0])


@rule("add", "add_any", "sub")
def _sum(propagator: Propagator, node: Node) -> Moments | None:
    """The sum of x and a function of x, or of two independent arrays."""
    moments = [propagator.moments(x).broadcast(node.shape) for x in node.operands]
    axes = max(moments, key=lambda m: m.mean.size).natural()
    a, b = (m.sequence(*axes) for m in moments)
    apart = independent(*node.operands)
    if node.op != "sub" and (apart or fork(node.nodes) is not None):
        for x, other in ((a, b), (b, a)):
            for branch in other.branches:
                out = _returned(x, other, branch)
                if out is not None:
                    propagator.note(node, "residual", "the branch linearised")
                    return fresh(*out, node.shape, *axes)
    if not apart:
        return None
    propagator.note(node, "sum", "addends independent")
    mean = a.mean - b.mean if node.op == "sub" else a.mean + b.mean
    return fresh(mean, a.cov.add(b.cov), node.shape, *axes)


def _returned(x: Sequence, other: Sequence, branch: Branch) -> tuple[Array, Any] | None:
    """Moments of x + f(x), if the branch f of `other` starts at x or at x normalised."""
    cross = branch.returned(x.mean)
    if cross is None:
        return None
    cov, other_cov = x.cov, other.cov
    if isinstance(cov, Separable) and cov.pool is not other_cov.pool:  # exclude masked tokens
        cov = cov.pooled(other_cov.pool)
    return residual(x.mean, cov, other.mean, other_cov, cross)


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
    summed = [1 if i in axes else m.shape[i] for i in over]
    entry = np.arange(np.prod(summed, dtype=int)).reshape(summed)
    entry = np.broadcast_to(entry, [m.shape[i] for i in over])
    choose = jax.nn.one_hot(entry.ravel(), entry.max() + 1, dtype=x.mean.dtype)  # (old, new)
    by_token = over is x.tokens
    if by_token:
        mean, cov = choose.T @ x.mean, x.cov.map_tokens(choose.T)
    else:
        mean, cov = x.mean @ choose, x.cov.map_features(choose)
    propagator.note(node, "sum over " + ("tokens" if by_token else "features"))
    left = [i for i in range(m.ndim) if i not in axes]
    tokens, features = (tuple(left.index(i) for i in g if i not in axes) for g in x.axes)
    return fresh(mean, cov, node.shape, tokens, features)


_DATA = {  # the operands that are not indices or conditions
    "concatenate": (0, None), "pad": (0, 2), "dynamic_update_slice": (0, 2), "select_n": (1, None),
}  # fmt: skip


@rule(*_DATA)
def _assembled(propagator: Propagator, node: Node) -> Moments | None:
    """The sum of independent operands, each at its own entries and zero elsewhere."""
    joined = node.op == "concatenate"
    data = range(len(node.operands))[slice(*_DATA[node.op])]
    parts = [node.operands[i] for i in data]
    others = (x for i, x in enumerate(node.operands) if i not in data)
    if not all(map(is_known, others)) or not independent(*parts):
        return None
    moments = [propagator.moments(x) for x in parts]
    # Number the entries of all parts, to see where they go.
    ends = np.cumsum([m.places.size for m in moments])
    numbers = (np.arange(e - m.places.size, e) for m, e in zip(moments, ends, strict=True))
    ids = [n.astype(np.int32).reshape(m.shape) for n, m in zip(numbers, moments, strict=True)]
    operands = [*node.operands[: data.start], *ids, *node.operands[data.stop :]]
    shown = np.asarray(evaluate(node.primitive, operands, node.params)[0])

    random = (m for x, m in zip(parts, moments, strict=True) if is_random(x))
    first = max(random, key=lambda m: m.places.size)
    tokens, features = first.natural()
    left = {i for i, n in enumerate(node.shape) if n > 1 and i not in features}
    axes = tuple(sorted({*tokens, *left})), features
    mean, covs = jnp.zeros((), first.mean.dtype), []
    for x, m, end in zip(parts, moments, ends, strict=True):
        if m.places.size == 0:
            continue
        if joined:
            own = m.sequence(*axes)
            m = own.changed(own.mean, own.cov, m.shape)
        local = np.where(shown < end, shown - end, 0)  # from the end: negative
        places = np.append(m.places, -1)[np.where(-local <= m.places.size, local - 1, -1)]
        rows = as_rows(places, *axes)
        mean = mean + taken(m.mean, rows)
        covs += [gather(m.cov, rows, zeros=joined)] if is_random(x) else []
    propagator.note(node, node.op, "parts independent" if len(covs) > 1 else "")
    return fresh(mean, covs[0].add(*covs[1:]), node.shape, *axes)
