"""Operations that move or add entries: views, sums, concatenation, assembly."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.propagation.crosses import covariance, joined
from moment_jax.propagation.errors import refuse
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Base, Moments, as_rows, fresh, ordered, taken
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
    return None if places is None else Moments(m.base, places[node.output])


@rule("belief")
def _belief(propagator: Propagator, node: Node) -> Moments:
    propagator.note(node, "weights as values")
    return propagator.moments(node.operands[0])


@rule("add", "add_any", "sub")
def _sum(propagator: Propagator, node: Node) -> Moments | None:
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
    return fresh(mean, cov, node.shape, *axes, parents)


def _signed(sign: int, cross: Any) -> Any:
    return cross if sign == 1 else cross.rescale(-jnp.ones((1, 1)))


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

    def carry(cross: Any) -> Any:
        return cross.map_tokens(choose.T) if by_token else cross.map_features(choose)

    propagator.note(node, "sum over " + ("tokens" if by_token else "features"))
    left = [i for i in range(m.ndim) if i not in axes]
    tokens, features = (tuple(left.index(i) for i in g if i not in axes) for g in x.axes)
    return fresh(mean, cov, node.shape, tokens, features, ((x, carry),))


_DATA = {  # the operands that are not indices or conditions
    "concatenate": (0, None), "pad": (0, 2), "dynamic_update_slice": (0, 2), "select_n": (1, None),
}  # fmt: skip


@rule(*_DATA)
def _assembled(propagator: Propagator, node: Node) -> Moments | None:
    """The sum of the operands, each at its own entries and zero elsewhere."""
    data = range(len(node.operands))[slice(*_DATA[node.op])]
    parts = [node.operands[i] for i in data]
    others = (x for i, x in enumerate(node.operands) if i not in data)
    if not all(map(is_known, others)):
        return None
    moments = [propagator.moments(x) for x in parts]
    # Number the entries of all parts, to see where they go.
    ends = np.cumsum([m.places.size for m in moments])
    numbers = (np.arange(e - m.places.size, e) for m, e in zip(moments, ends, strict=True))
    ids = [n.astype(np.int32).reshape(m.shape) for n, m in zip(numbers, moments, strict=True)]
    operands = [*node.operands[: data.start], *ids, *node.operands[data.stop :]]
    shown = np.asarray(evaluate(node.primitive, operands, node.params)[0])

    # Where each entry is in its array; parts of one array are one part.
    mean: Any = jnp.zeros((), moments[0].mean.dtype)
    whole: dict[Base, np.ndarray] = {}
    for x, m, end in zip(parts, moments, ends, strict=True):
        if m.places.size == 0:
            continue
        local = np.where(shown < end, shown - end, 0)  # from the end: negative
        places = np.append(m.places, -1)[np.where(-local <= m.places.size, local - 1, -1)]
        if is_random(x):
            whole[m.base] = np.maximum(places, whole.get(m.base, -1))
        else:
            mean = mean + taken(m.mean, places)
    arrays = [Moments(base, places) for base, places in whole.items()]
    if len(arrays) == 1 and mean.ndim == 0 and (arrays[0].places >= 0).all():
        return arrays[0]
    random = (m for x, m in zip(parts, moments, strict=True) if is_random(x))
    tokens, features = max(random, key=lambda m: m.places.size).natural()
    left = [i for i, n in enumerate(node.shape) if n > 1 and i not in (*tokens, *features)]
    tokens, features = (tokens, features) if features else (tokens, tuple(left))
    tokens = tuple(sorted({*tokens, *left} - {*features}))
    found = joined(propagator, node, [m.sequence(tokens, features) for m in arrays])
    if mean.ndim:  # of the certain parts
        found.mean = found.mean + as_rows(mean, tokens, features)
    propagator.note(node, node.op)
    return Moments(found, ordered(node.shape, tokens, features))
