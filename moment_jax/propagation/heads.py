"""The layout of attention: which entries of scores and weights belong to which head, query and key."""

import math
from typing import Any, NamedTuple

import numpy as np

from moment_jax.propagation.graph import Node
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


def find_scores(weights: Node) -> Node | None:
    """The product of two random arrays from which these weights are computed."""
    for source in sources(weights, lambda n: n.op in BY_ROW):
        if source.op == "dot_general":
            return source if len(source.nodes) == 2 else None
    return None


def find_layout(
    node: Node, side: int, weights: Node, scores: Node, left: Projection, right: Projection,
    value: Projection,
) -> tuple[Layout, np.ndarray] | None:  # fmt: skip
    """The layout of attention, and the places of the output's entries in (T, H K)."""
    shown = follow(weights, scores)
    if shown is None:
        return None
    (lc, rc), (lb, rb) = scores.params["dimension_numbers"]
    l_token, l_column = _grouped(left, lb, lc)
    r_token, r_column = _grouped(right, rb, rc)
    contract, batch = node.params["dimension_numbers"]
    wc, vc, wb, vb = contract[side], contract[1 - side], batch[side], batch[1 - side]
    wf = [i for i in range(len(weights.shape)) if i not in (*wc, *wb)]
    at = shown.transpose(*wb, *wf, *wc)
    n_batch = math.prod(at.shape[: len(wb)])
    at = at.reshape(n_batch, -1, math.prod(at.shape[len(wb) + len(wf) :]))
    entry = np.arange(weights.size).reshape(weights.shape).transpose(*wb, *wf, *wc)
    entry = entry.reshape(at.shape)
    b, left_row, right_row = np.unravel_index(
        at, (l_token.shape[0], l_token.shape[1], r_token.shape[1])
    )
    lt, rt = l_token[b, left_row], r_token[b, right_row]
    swapped = bool((lt != lt[..., :1]).any()) or (lt.shape[-1] == 1 and bool(lt.max() > rt.max()))
    (qt, qi, qc), (kt, ki, kc) = (lt, left_row, l_column), (rt, right_row, r_column)
    if swapped:
        (qt, qi, qc), (kt, ki, kc) = (kt, ki, kc), (qt, qi, qc)
    v_token, v_column = _grouped(value, vb, vc, middle=True)
    first = qc[b[..., 0], qi[..., 0], 0]  # each query head's first column
    heads, index = np.unique(first, return_inverse=True)
    index = index.reshape(first.shape)
    h, t, s = len(heads), len(np.unique(qt)), at.shape[-1]
    if h * t != first.size or (kt != kt[:1, :1]).any() or (qt != qt[..., :1]).any():
        return None
    order = np.empty((h, t), int)
    order[index.ravel(), qt[..., 0].ravel()] = np.arange(h * t)
    keys = np.argsort(kt[0, 0])
    in_order = np.array_equal(np.sort(kt[0, 0]), np.arange(s))
    if not in_order or (v_token != kt[0, 0][None, :, None]).any():
        return None
    pick = order[:, 0]
    row_batch = np.repeat(np.arange(n_batch), at.shape[1])
    flat_b, flat_q, flat_k = (x.reshape(h * t, s)[pick, 0] for x in (b, qi, ki))
    columns = qc[flat_b, flat_q], kc[flat_b, flat_k], v_column[row_batch[pick], 0]
    at, entry = (x.reshape(h * t, s)[order][..., keys] for x in (at, entry))
    width = v_column.shape[-1]
    place = qt[..., 0] * (h * width) + index * width
    out = place[..., None] + np.arange(width)
    batch_shape = [weights.shape[i] for i in wb], [weights.shape[i] for i in wf]
    free = [i for i in range(value.places.ndim) if i not in (*vc, *vb)]
    out = out.reshape(*batch_shape[0], *batch_shape[1], *[value.places.shape[i] for i in free])
    if side == 1:  # the values' free axes come first
        nb, nf = len(wb), len(wf)
        out = np.moveaxis(out, range(nb, nb + nf), range(out.ndim - nf, out.ndim))
    return Layout(*columns, at, entry, swapped), out.reshape(node.shape)


def _grouped(
    p: Projection, batch: Any, contract: Any, *, middle: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and columns of an operand as (batch, free, contracted), or (batch, contracted, free)."""
    free = [i for i in range(p.places.ndim) if i not in (*batch, *contract)]
    order = (*batch, *contract, *free) if middle else (*batch, *free, *contract)
    shape = p.places.shape
    sizes = [math.prod(shape[i] for i in axes) for axes in (batch, free, contract)]
    sizes = [sizes[0], sizes[2], sizes[1]] if middle else sizes
    tokens, columns = (x.transpose(order).reshape(sizes) for x in p.decoded())
    return (tokens if middle else tokens[..., 0]), columns
