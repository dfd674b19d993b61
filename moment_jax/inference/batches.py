"""Batches of one size, whatever the size of the data: programs are compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from moment_jax.inference.variational import STEPS_AT_ONCE

SIZES = (32, 64, 128, 256)


def batch_size(size: int) -> int:
    """The first of `SIZES` that holds all examples, or the largest."""
    return next((b for b in SIZES if b >= size), SIZES[-1])


def shuffled(arrays: Any, size: int, seed: int) -> Iterator[Any]:
    """Endless groups of `STEPS_AT_ONCE` batches, (steps, batch, ...), one permutation after another.

    Every example comes as often as every other, so the average of a batch is without bias.
    """
    rng = np.random.default_rng(seed)
    shape = (STEPS_AT_ONCE, batch_size(size))
    order = np.empty(0, np.int64)
    while True:
        while order.size < shape[0] * shape[1]:
            order = np.concatenate([order, rng.permutation(size)])
        rows, order = order[: shape[0] * shape[1]].reshape(shape), order[shape[0] * shape[1] :]
        yield jax.tree.map(lambda x, rows=rows: x[rows], arrays)


def padded(arrays: Any, size: int) -> Iterator[tuple[Any, int]]:
    """Batches in order, the last one filled up with its first example, and how many of each count."""
    batch = batch_size(size)
    for first in range(0, size, batch):
        rows = np.arange(first, first + batch)
        rows = np.where(rows < size, rows, first)
        yield jax.tree.map(lambda x, rows=rows: x[rows], arrays), min(batch, size - first)
