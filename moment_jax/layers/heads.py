"""Heads: (T, H K) arrays as (H, T, K), how many run at once, and what all structures' softmax keeps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import nonnegative, safe_divide

_MANY_SCORES = 2**21
"""Heads with more scores than this in total are processed one at a time."""


def split_heads(array: Array, num_heads: int) -> Array:
    """(T, H K) -> (H, T, K), heads outermost in the features."""
    t, width = array.shape
    return array.reshape(t, num_heads, width // num_heads).swapaxes(0, 1)


def merge_heads(array: Array) -> Array:
    """(H, T, K) -> (T, H K)."""
    h, t, k = array.shape
    return array.swapaxes(0, 1).reshape(t, h * k)


def rotate(heads: Array, turn: Array | None) -> Array:
    """All heads' queries or keys, (H, T, K), each token multiplied by its (K, K) matrix."""
    return heads if turn is None else jnp.einsum("htj,tjk->htk", heads, turn)


def kept_jacobian(found: Array, second: Array, averaged: Array) -> tuple[Array, Array]:
    """The average fraction of its Jacobian that the softmax keeps under noise, and a bound, per row.

    By Price's theorem noise passes through the expected Jacobian, diag(E[w]) - E[w w^T], smaller
    than diag(w) - w w^T at the mean weights w. It is taken as one gain per row times the latter, such
    that the law of total variance holds: gain^2 V + gain W = W.

    Args:
      found: V, the variance of weights @ values from the scores' noise through the Jacobian at w.
      second: E[v^2] under the mean weights.
      averaged: E[A^2] of the averages A = weights @ values.

    Returns:
      The gain, 0 where a row has all its weight on one key; and W, E[v^2] - E[A^2] beyond rounding.
    """
    left = left_within(second, averaged)
    ratio = safe_divide(nonnegative(found), left)
    return jnp.where(left > 0, 2 / (1 + jnp.sqrt(1 + 4 * ratio)), 0), left


def left_within(second: Array, averaged: Array) -> Array:
    """The variance of values under the weights, E[v^2] - E[A^2], and 0 where that is rounding."""
    left = second - averaged
    return jnp.where(left > 16 * jnp.finfo(left.dtype).eps * second, left, 0)


def each_head(one_head: Callable[[Any], Any], heads: Any, num_scores: int) -> Any:
    """`one_head` applied to each head, along the leading axis H of every array.

    If the heads' (T, S) arrays, `num_scores` numbers in all, are large, heads run one at a time with
    checkpointing, so that only one head's arrays are alive, also in the backward pass.
    """
    if num_scores <= _MANY_SCORES:
        return jax.vmap(one_head)(heads)
    return jax.lax.map(jax.checkpoint(one_head), heads)
