"""The steps of attention common to all structures, from mean scores to averaged values.

A structure supplies the covariance of the scores (`rows`), and the effect of noisy scores and values on
the average (`output`). Arrays are one head's, or have a leading axis of all heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.expectations import masked_softmax
from moment_jax.layers.attention.inputs import Centres, Mixing, root_width
from moment_jax.xla import materialized

In = TypeVar("In")
Out = TypeVar("Out")

_MANY_SCORES = 2**21
"""Heads with more scores than this in total are processed one at a time."""


class Rows(Protocol):
    """Covariance of the scores, as a structure holds it."""

    def expected_softmax(self, scores: Array, mask: Array | None) -> Array:
        """E[softmax] of scores with these means, (T, S)."""
        ...


class Output(NamedTuple):
    """The effect of noise on weights @ values."""

    noise: Any  # the covariance, in the structure's own form
    gain: Array | None = None  # fraction of its Jacobian that the softmax keeps, (T,); None for 1
    shared: Array | None = None  # sum_c Cov[W_ac, v_cd], through a shared input, (T, K)


class HeadMoments(Protocol):
    """Moments of queries, keys and values, in one structure."""

    @property
    def centres(self) -> Centres:
        """Mean queries, keys and values."""
        ...

    def shared_scores(self) -> Array | None:
        """sum_d Cov[q_ad, k_cd], through a shared input, (T, S); None if there is none."""
        ...

    def rows(self) -> Rows:
        """Covariance of the scores."""
        ...

    def output(self, rows: Any, weights: Array, mean: Array, order: int) -> Output:
        """The effect of noise on `mean`, weights @ values, given E[softmax], (T, S)."""
        ...


def mix(head: HeadMoments, mask: Array | None, order: int) -> tuple[Array, Any, Mixing]:
    """Mean (T, K) of weights @ values, its noise in the structure's form, and the weights.

    `mask` is (T, S), True where a query may look, or None; `order` is 1 (Taylor at the mean) or 2.
    """
    query, key, value = head.centres
    scores = query @ jnp.swapaxes(key, -1, -2)
    shared = head.shared_scores() if order == 2 else None
    if shared is not None:
        scores = scores + shared
    scores = materialized(scores / root_width(query))
    rows = head.rows()
    weights = masked_softmax(scores, mask) if order == 1 else rows.expected_softmax(scores, mask)
    weights = materialized(weights)
    mean = weights @ value
    output = head.output(rows, weights, mean, order)
    if order == 2 and output.shared is not None:
        mean = mean + output.shared
    return mean, output.noise, Mixing(weights, output.gain)


def each_head(mix_one: Callable[[In], Out], heads: In, num_scores: int) -> Out:
    """`mix_one` applied to each head, along the leading axis H of every array.

    If the heads' (T, S) arrays, `num_scores` numbers in all, are large, heads run one at a time with
    checkpointing, so that only one head's arrays are alive, also in the backward pass.
    """
    if num_scores <= _MANY_SCORES:
        return jax.vmap(mix_one)(heads)
    result: Out = jax.lax.map(jax.checkpoint(mix_one), heads)
    return result
