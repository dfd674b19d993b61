"""The steps of attention that all structures share, from mean scores to the averaged values.

A structure supplies what differs: the covariance of the scores (`rows`), and what the noise of scores
and values makes of the average (`output`). Arrays are one head's, or have a leading axis of all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from moment_jax.expectations import masked_softmax
from moment_jax.layers.attention.inputs import Centres, Mixing, root_width
from moment_jax.xla import materialized

Array = jax.Array
In = TypeVar("In")
Out = TypeVar("Out")

_MANY_SCORES = 2**21
"""Scores of all heads beyond which heads are mixed one after another."""


class Rows(Protocol):
    """Covariance of the scores, as one structure holds it."""

    def expected_softmax(self, scores: Array, mask: Array | None) -> Array:
        """E[softmax] of scores of these means, (T, S)."""
        ...


class Output(NamedTuple):
    """What noise makes of weights @ values."""

    noise: Any  # the covariance, in whatever arrays the structure goes on with
    gain: Array | None = None  # what the softmax keeps of its Jacobian, (T,); None for all
    shared: Array | None = None  # sum_c Cov[W_ac, v_cd], through an input in common, (T, K)


class HeadMoments(Protocol):
    """Moments of queries, keys and values, in one structure."""

    @property
    def centres(self) -> Centres:
        """Their means."""
        ...

    def shared_scores(self) -> Array | None:
        """sum_d Cov[q_ad, k_cd], through an input in common, (T, S); None where there is none."""
        ...

    def rows(self) -> Rows:
        """Covariance of the scores."""
        ...

    def output(self, rows: Any, weights: Array, mean: Array, order: int) -> Output:
        """What noise makes of `mean`, weights @ values, given E[softmax], (T, S)."""
        ...


def mix(head: HeadMoments, mask: Array | None, order: int) -> tuple[Array, Any, Mixing]:
    """Mean (T, K) of weights @ values, its noise as the structure goes on with it, and the weights.

    Args:
      head: moments of queries, keys and values.
      mask: boolean (T, S), True where a query may look; None for all.
      order: 1 (Taylor at the mean) or 2.
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
    """`mix_one` of every head, leading axis H.

    Where the heads' (T, S) arrays are many and large they are mixed one after another, which keeps those
    of a single head alive, in the backward pass as well.

    Args:
      mix_one: one head's moments -> one head's result.
      heads: all heads' moments, leading axis H on every array.
      num_scores: H T S.
    """
    if num_scores <= _MANY_SCORES:
        return jax.vmap(mix_one)(heads)
    result: Out = jax.lax.map(jax.checkpoint(mix_one), heads)
    return result
