"""The layout of attention: which entries of scores and weights belong to which head, query and key."""

from typing import NamedTuple

import numpy as np

from moment_jax.propagation.graph import Node
from moment_jax.propagation.moments import as_rows
from moment_jax.propagation.primitives import factors, in_product
from moment_jax.propagation.projections import Projection
from moment_jax.propagation.regions import BY_ROW, follow, sources


class Layout(NamedTuple):
    """The head, query and key of each entry of the scores and weights."""

    query_columns: np.ndarray  # (H, K)
    key_columns: np.ndarray
    value_columns: np.ndarray
    scores: np.ndarray  # places of the scores in their array, (H, T, S)
    weights: np.ndarray  # places of the weights in theirs, (H, T, S)
    swapped: bool  # whether the keys are the left factor of the scores
    output: np.ndarray  # places of the output's entries in (T, H K)


def find_scores(weights: Node) -> Node | None:
    """The product of two random arrays from which these weights are computed."""
    for source in sources(weights, lambda n: n.op in BY_ROW):
        if source.op == "dot_general":
            return source if len(source.nodes) == 2 else None
    return None


def find_layout(
    node: Node, side: int, weights: Node, scores: Node, left: Projection, right: Projection,
    value: Projection,
) -> Layout | None:  # fmt: skip
    """The layout of attention whose output is `node`, with the weights on this side of the product."""
    shown = follow(weights, scores)
    if shown is None:
        return None
    own, other = factors(node)[side], factors(node)[1 - side]
    at = as_rows(shown, *own)  # places of the scores; (batch, rows, keys), like all that follow
    entry = as_rows(np.arange(weights.size).reshape(weights.shape), *own)
    (lt, lc), (rt, rc) = (
        p.decoded(*f) for p, f in zip((left, right), factors(scores), strict=True)
    )
    batch, *rows = np.unravel_index(at, (*lt.shape[:2], rt.shape[1]))
    # The token and the first column of both factors of each score.
    (lt, l_first), (rt, r_first) = (
        (t[batch, i, 0], c[batch, i, 0])
        for (t, c), i in zip(((lt, lc), (rt, rc)), rows, strict=True)
    )
    swapped = bool((lt != lt[..., :1]).any()) or (lt.shape[-1] == 1 and bool(lt.max() > rt.max()))
    query, key, first = (rt, lt, r_first) if swapped else (lt, rt, l_first)
    heads, head = np.unique(first, return_inverse=True)
    head = head.reshape(first.shape)
    shape = len(heads), len(np.unique(query)), at.shape[-1]
    if np.prod(shape) != at.size or key.max() >= shape[2] or query.max() >= shape[1]:
        return None
    table = np.full(shape, -1)
    table[head, query, key] = np.arange(at.size)
    # Every weight has a place; rows are those of a query, and columns those of a key and a value.
    value_tokens, value_columns = value.decoded(other.batch, other.contracted, other.free)
    by_row = (head == head[..., :1]) & (query == query[..., :1])
    by_key = (key == key[:1, :1]).all() and (value_tokens == key[0, 0][:, None]).all()
    if (table < 0).any() or not by_row.all() or not by_key:
        return None
    pick = np.unravel_index(table[:, 0, 0], at.shape)  # an entry of each head
    l_columns, r_columns = (c[batch[pick], i[pick]] for c, i in zip((lc, rc), rows, strict=True))
    columns = (r_columns, l_columns) if swapped else (l_columns, r_columns)
    width = value_columns.shape[-1]
    output = (query[..., 0] * len(heads) + head[..., 0])[..., None] * width + np.arange(width)
    return Layout(
        *columns, value_columns[pick[0], pick[2]], at.ravel()[table], entry.ravel()[table], swapped,
        in_product(node, side, output),
    )  # fmt: skip
