"""Operations that move or add entries: views, sums, concatenation, assembly."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.layers.residual import residual
from moment_jax.layers.seen import pool_as
from moment_jax.propagation import origins
from moment_jax.propagation.branches import Branch
from moment_jax.propagation.errors import refuse
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Moments, Sequence, as_rows, fresh, gather, taken
from moment_jax.propagation.primitives import VIEWS, evaluate, is_known, moved
from moment_jax.propagation.propagator import Propagator, rule
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
    """The sum of x and a function of x, or of two arrays with or without a common origin."""
    moments = [propagator.moments(x).broadcast(node.shape) for x in node.operands]
    axes = max(moments, key=lambda m: m.mean.size).natural()
    a, b = (m.sequence(*axes) for m in moments)
    sign = -1 if node.op == "sub" else 1
    tied = propagator.tied and len({origins.dominator(node.nodes, t) for t in (False, True)}) > 1
    if sign == 1 and not tied:
        for x, other in ((a, b), (b, a)):
            for branch in other.branches:
                out = _returned(x, other, branch)
                if out is not None:
                    propagator.note(node, "residual", "the branch linearised")
                    return fresh(*out, node.shape, *axes)
    cov = a.cov.add(b.cov)
    cross, assumed = origins.cross_of(propagator, node, "addends", axes)
    if cross is not None:
        cov = origins.with_cross(cov, sign * cross)
    propagator.note(node, "sum", assumed)
    return fresh(a.mean + sign * b.mean, cov, node.shape, *axes)


def _returned(x: Sequence, other: Sequence, branch: Branch) -> tuple[Array, Any] | None:
    """Moments of x + f(x), if the branch f of `other` starts at x or at x normalised."""
    tangent = branch.tangent(x.mean.shape[0])
    if tangent is None or not (x.mean is branch.mean or x.mean is branch.inner):
        return None
    norm = branch.norm if x.mean is branch.mean else None
    cov, pool = x.cov, getattr(other.cov, "pool", None)
    if pool is not None and cov.pool is None:  # exclude masked tokens
        cov = cov.pooled(pool)
    mean, cov = residual(x.mean, cov, other.mean, other.cov, tangent, norm)
    if branch.attention is None and norm is not None:  # end of a block, as in layers
        cov = pool_as(cov, type(cov).zeros(cov.shape, cov.dtype))
    return mean, cov


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
    """The sum of the operands, each at its own entries and zero elsewhere.

    Concatenated parts keep the covariance of every pair.
    """
    joined = node.op == "concatenate"
    data = range(len(node.operands))[slice(*_DATA[node.op])]
    if not all(is_known(x) for i, x in enumerate(node.operands) if i not in data):
        return None
    parts = [node.operands[i] for i in data]
    moments = [propagator.moments(x) for x in parts]
    # Number the entries of all parts, to see where they go.
    ends = np.cumsum([m.places.size for m in moments])
    ids = [
        np.arange(end - m.places.size, end, dtype=np.int32).reshape(m.shape)
        for m, end in zip(moments, ends, strict=True)
    ]
    operands = [*node.operands[: data.start], *ids, *node.operands[data.stop :]]
    shown = np.asarray(evaluate(node.primitive, operands, node.params)[0])

    first = max((m for x, m in zip(parts, moments, strict=True) if is_random(x)), key=_size)
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
    cov = covs[0].add(*covs[1:])
    if joined:
        cross = _between(propagator, parts, ends)
        if cross is not None:
            cov = origins.with_cross(cov, origins.as_sequence(cross, shown, shown, axes))
        propagator.note(node, node.op, origins.assumed("parts", parts, cross is not None))
    else:
        propagator.note(node, "assembled", "parts independent" if len(covs) > 1 else "")
    return fresh(mean, cov, node.shape, *axes)


def _size(m: Moments) -> int:
    return m.places.size


def _between(propagator: Propagator, parts: list[Any], ends: np.ndarray) -> Array | None:
    """Covariances of entries of each part with those of later ones, (N, N); None if all unknown."""
    if ends[-1] ** 2 > origins.LARGEST:
        return None
    total: Any = None
    for (a, i), (b, j) in itertools.combinations(zip(parts, ends, strict=True), 2):
        dense = origins.common(propagator, a, b)
        if dense is not None:
            total = jnp.zeros((ends[-1], ends[-1]), dense.dtype) if total is None else total
            dense = dense.astype(total.dtype)
            total = total.at[i - a.size : i, j - b.size : j].set(dense)
    return total
