"""Operations that move or add entries: views, sums, concatenation, assembly."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.layers.residual import residual
from moment_jax.layers.seen import pool_as
from moment_jax.propagation import origins
from moment_jax.propagation.branches import Branch
from moment_jax.propagation.dense import branches_of, spread
from moment_jax.propagation.errors import refuse
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Moments, fresh
from moment_jax.propagation.primitives import VIEWS, evaluate, is_known, is_view, moved
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.weights import Weight


@rule(*VIEWS)
def _view(propagator: Propagator, node: Node) -> Moments | None:
    rest = list(node.operands[1:])
    if any(map(is_random, rest)):
        raise refuse(
            f"`{node.op}` at a random index",
            node.source,
            "Indices must be static: compute them from certain values.",
        )
    if not all(map(is_known, rest)) or not is_view(node):
        return None
    if node.op == "gather" and isinstance(node.operands[0], Weight) and node.operands[0].ndim == 2:
        return None  # embedding lookup
    m = propagator.moments(node.operands[0])
    places = moved(node.primitive, m.places, rest, node.params)[node.output]
    return Moments(m.mean, m.cov, places, m.branches)


@rule("belief")
def _belief(propagator: Propagator, node: Node) -> Moments:
    propagator.note(node, "weights as values")
    return propagator.moments(node.operands[0])


@rule("neg")
def _negative(propagator: Propagator, node: Node) -> Moments:
    m = propagator.moments(node.operands[0])
    return Moments(-m.mean, m.cov, m.places)


@rule("add", "add_any", "sub")
def _sum(propagator: Propagator, node: Node) -> Moments | None:
    """The sum of x and a function of x, or of two arrays with or without a common origin."""
    a, b = (spread(propagator.moments(x), node.shape) for x in node.operands)
    tokens, features = a.natural() if a.mean.size >= b.mean.size else b.natural()
    (mean_a, cov_a), (mean_b, cov_b) = (m.sequence(tokens, features) for m in (a, b))
    sign = -1 if node.op == "sub" else 1
    starts = {origins.dominator(node.nodes, t) for t in (False, True)} if propagator.tied else ()
    tied = len(starts) > 1
    if sign == 1 and not tied:
        for mean, cov, m, other, other_cov in (
            (mean_a, cov_a, b, mean_b, cov_b),
            (mean_b, cov_b, a, mean_a, cov_a),
        ):
            for branch in branches_of(m, other, tokens, features):
                out = _returned(mean, cov, other, other_cov, branch)
                if out is not None:
                    propagator.note(node, "residual", "the branch linearised")
                    return fresh(*out, node.shape, tokens, features)
    cov = cov_a.add(cov_b)
    cross = origins.cross_of(propagator, node, node.operands, tokens, features)
    if cross is not None:
        cov = origins.with_cross(cov, sign * cross)
    propagator.note(node, "sum", origins.assumed("addends", node.operands, cross is not None))
    return fresh(mean_a + sign * mean_b, cov, node.shape, tokens, features)


def _returned(
    mean: Array, cov: Any, other: Array, other_cov: Any, branch: Branch
) -> tuple[Array, Any] | None:
    """Moments of x + f(x), if the branch f starts at x or at x normalised."""
    tangent = branch.tangent(mean.shape[0])
    if tangent is None or not (mean is branch.mean or mean is branch.inner):
        return None
    norm = branch.norm if mean is branch.mean else None
    pool = getattr(other_cov, "pool", None)
    if pool is not None and cov.pool is None:  # exclude masked tokens
        cov = cov.pooled(pool)
    mean, cov = residual(mean, cov, other, other_cov, tangent, norm)
    if branch.attention is None and norm is not None:  # end of a block, as in layers
        cov = pool_as(cov, type(cov).zeros(cov.shape, cov.dtype))
    return mean, cov


@rule("reduce_sum")
def _total(propagator: Propagator, node: Node) -> Moments | None:
    """The sum over tokens, or over features."""
    m = propagator.moments(node.operands[0])
    axes = tuple(node.params["axes"])
    by_token, by_feature = m.natural()
    long = [i for i in axes if m.shape[i] > 1]
    if not all(i in by_token for i in long) and not all(i in by_feature for i in long):
        return None
    mean, cov = m.sequence(by_token, by_feature)
    over = by_token if all(i in by_token for i in long) else by_feature
    shape = [m.shape[i] for i in over]
    summed = [1 if i in axes else n for i, n in zip(over, shape, strict=True)]
    rows = np.broadcast_to(np.arange(math.prod(summed)).reshape(summed), shape).ravel()
    choose = jax.nn.one_hot(rows, math.prod(summed), dtype=mean.dtype)  # (old, new)
    mean, cov = _mapped(mean, cov, choose, over is by_token)
    left = [i for i in range(len(m.shape)) if i not in axes]

    def renamed(old: Any) -> tuple[int, ...]:
        return tuple(left.index(i) for i in old if i not in axes)

    propagator.note(node, "sum over " + ("tokens" if over is by_token else "features"))
    return fresh(mean, cov, node.shape, renamed(by_token), renamed(by_feature))


def _mapped(mean: Array, cov: Any, kernel: Array, tokens: bool) -> tuple[Array, Any]:
    """A sequence times a kernel (old, new) of its tokens, or of its features."""
    if tokens:
        return kernel.T @ mean, cov.map_tokens(kernel.T)
    return mean @ kernel, cov.map_features(kernel)


@rule("concatenate")
def _concatenated(propagator: Propagator, node: Node) -> Moments:
    """The sum of the parts, each padded with zeros, with the covariance of every pair."""
    axis = node.params["dimension"]
    parts = [propagator.moments(x) for x in node.operands]
    first = max(parts, key=lambda m: m.mean.size * is_random(m))
    tokens, features = first.natural()
    if axis not in tokens and axis not in features:
        tokens = tuple(sorted((*tokens, axis)))
    total: Any = None
    start = 0
    index = np.arange(node.size).reshape(node.shape)
    cross, shown = None, []
    for part in parts:
        mean, cov = part.sequence(tokens, features)
        size = part.shape[axis]
        axes = tokens if axis in tokens else features
        lead = [node.shape[i] for i in axes]
        at = np.arange(math.prod(lead)).reshape(lead)
        chosen = np.take(at, range(start, start + size), axes.index(axis)).ravel()
        choose = jax.nn.one_hot(chosen, at.size, dtype=mean.dtype)  # (old, new)
        placed = _mapped(mean, cov, choose, axis in tokens)
        total = placed if total is None else (total[0] + placed[0], total[1].add(placed[1]))
        shown.append(np.take(index, range(start, start + size), axis).ravel())
        start += size
    for (a, at), (b, to) in itertools.combinations(zip(node.operands, shown, strict=True), 2):
        if not (isinstance(a, Node) and isinstance(b, Node)) or index.size**2 > origins.LARGEST:
            continue
        dense = origins.common(propagator, a, b)
        if dense is not None:
            cross = jnp.zeros((index.size, index.size), dense.dtype) if cross is None else cross
            cross = cross.at[at[:, None], to[None]].set(dense.astype(cross.dtype))
    mean, cov = total
    if cross is not None:
        cov = origins.with_cross(cov, origins.as_sequence(cross, index, index, tokens, features))
    propagator.note(node, "concatenate", origins.assumed("parts", node.operands, cross is not None))
    return fresh(mean, cov, node.shape, tokens, features)


_DATA = {"pad": (0, 2), "dynamic_update_slice": (0, 2), "select_n": (1, None)}


@rule(*_DATA)
def _assembled(propagator: Propagator, node: Node) -> Moments | None:
    """The sum of the operands, each at its own entries and zero elsewhere."""
    data = range(len(node.operands))[slice(*_DATA[node.op])]
    rest = [x for i, x in enumerate(node.operands) if i not in data]
    if any(is_random(x) or not is_known(x) for x in rest):
        return None
    ids, start = list(node.operands), 1
    for i in data:
        shape = np.shape(node.operands[i])
        size = math.prod(shape)
        ids[i] = np.arange(start, start + size, dtype=np.int32).reshape(shape)
        start += size
    shown = np.asarray(evaluate(node.primitive, ids, node.params)[0])
    random = [i for i in data if is_random(node.operands[i])]
    largest = max((node.operands[i] for i in random), key=lambda x: math.prod(x.shape))
    first = propagator.moments(largest)
    tokens, features = first.natural()
    left = {i for i, n in enumerate(node.shape) if n > 1 and i not in features}
    tokens = tuple(sorted({*tokens, *left}))
    mean, covs = jnp.zeros((), first.mean.dtype), []
    for i in data:
        here = np.isin(shown, ids[i])
        m = propagator.moments(node.operands[i])
        local = np.where(here, shown - ids[i].ravel()[0], 0)
        part = Moments(m.mean, m.cov, np.where(here, m.places.ravel()[local], -1))
        part_mean, cov = part.sequence(tokens, features)
        mean = mean + part_mean
        covs += [cov] if i in random else []
    propagator.note(node, "assembled", "parts independent" if len(covs) > 1 else "")
    return fresh(mean, covs[0].add(*covs[1:]), node.shape, tokens, features)
