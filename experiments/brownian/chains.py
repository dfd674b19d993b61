"""Reversible and irreversible parts of attention's scores and projections."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class ScoreParts(NamedTuple):
    """A matrix as symmetric + gradient + cyclic, and the share of each in its squared norm.

    The chain softmax(s) is reversible exactly where the cyclic part is zero. All shares are zero where
    every row is constant; else they sum to one.
    """

    symmetric: Array  # (s + s^T)/2
    gradient: Array  # the part g_j - g_i of the antisymmetric rest
    cyclic: Array  # what is left: flow around cycles of tokens
    symmetric_share: Array
    gradient_share: Array
    cyclic_share: Array


def split_scores(scores: Array) -> ScoreParts:
    """Split scores (T, T) into the parts of a reversible chain and the part that makes it irreversible.

    The rows of scores are centred first: a softmax does not see a constant in its row.
    Detailed balance pi_i P_ij = pi_j P_ji for P = softmax(s) says s_ij - s_ji = g_j - g_i for some
    g, so the antisymmetric part is projected onto such differences; what is left is orthogonal to them.
    """
    if scores.ndim != 2 or scores.shape[0] != scores.shape[1]:
        raise ValueError(f"`split_scores` needs scores (T, T). Got {tuple(scores.shape)}.")
    scores = scores - jnp.mean(scores, axis=1, keepdims=True)
    symmetric, antisymmetric = (scores + scores.T) / 2, (scores - scores.T) / 2
    height = jnp.mean(antisymmetric, axis=0)
    gradient = height[None, :] - height[:, None]
    cyclic = antisymmetric - gradient
    squares = [jnp.sum(part**2) for part in (symmetric, gradient, cyclic)]
    total = sum(squares[1:], squares[0])
    share = [square / jnp.where(total > 0, total, 1) for square in squares]
    return ScoreParts(symmetric, gradient, cyclic, *share)


def antisymmetric_share(query_kernel: Array, key_kernel: Array) -> Array:
    """Antisymmetric share of the squared norm of one head's form Wq Wk^T, of kernels (D, K).

    With identity projections it is 0; with independent random ones about a half. The
    form's antisymmetric part is what can make attention's chain irreversible; how much of it the tokens
    see is `split_scores` of their scores.
    """
    if query_kernel.ndim != 2 or query_kernel.shape != key_kernel.shape:
        raise ValueError(
            "`antisymmetric_share` needs two kernels (D, K) of one head. Got "
            f"{tuple(query_kernel.shape)} and {tuple(key_kernel.shape)}. For all heads, use jax.vmap "
            "with in_axes=1 on kernels (D, H, K)."
        )
    form = query_kernel @ key_kernel.T
    total = jnp.sum(form**2)
    return jnp.sum((form - form.T) ** 2) / 4 / jnp.where(total > 0, total, 1)
