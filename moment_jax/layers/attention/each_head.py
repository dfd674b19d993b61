"""Heads all at once, or one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

In = TypeVar("In")
Out = TypeVar("Out")

_MANY_SCORES = 2**21
"""Scores of all heads beyond which heads are mixed one after another."""


def each_head(mix: Callable[[In], Out], heads: In, num_scores: int) -> Out:
    """`mix` of every head, leading axis H.

    Where the heads' (T, S) arrays are many and large they are mixed one after another, which keeps those
    of a single head alive, in the backward pass as well.

    Args:
      mix: one head's moments -> one head's result.
      heads: all heads' moments, leading axis H on every array.
      num_scores: H T S.
    """
    if num_scores <= _MANY_SCORES:
        return jax.vmap(mix)(heads)
    result: Out = jax.lax.map(jax.checkpoint(mix), heads)
    return result
