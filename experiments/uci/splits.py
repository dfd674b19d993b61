"""All splits of a set, standardised by their training rows and padded to one length."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.uci.files import RegressionSet

VALIDATION = 0.2  # share of the training rows on which settings are chosen


class Rows(NamedTuple):
    """Rows of each split: x (S, N, D), y (S, N), weight (S, N), 0 where a row only fills up."""

    x: Any
    y: Any
    weight: Any


class Splits(NamedTuple):
    """What every split trains on and is tested on, and the scale (S,) of its targets.

    Both parts are standardised by the training part. A density of y is that of the standardised one
    over `scale`.
    """

    train: Rows
    test: Rows
    scale: np.ndarray


def whole(given: RegressionSet) -> Splits:
    """Every split as the file has it."""
    return _side_by_side(given, given.train, given.test)


def held_out(given: RegressionSet, seed: int) -> Splits:
    """Of the training rows alone: a fifth, drawn by the seed, takes the place of the test rows."""
    parts = []
    for number, rows in enumerate(given.train):
        order = np.random.default_rng([seed, number]).permutation(rows)
        cut = _num_held_out(rows)
        parts.append((order[cut:], order[:cut]))
    return _side_by_side(given, [p[0] for p in parts], [p[1] for p in parts])


def _num_held_out(rows: np.ndarray) -> int:
    return max(1, round(VALIDATION * len(rows)))


def _side_by_side(given: RegressionSet, train: list[np.ndarray], test: list[np.ndarray]) -> Splits:
    scaled = [_standardised(given, *pair) for pair in zip(train, test, strict=True)]
    # The same room whichever parts are asked for, so that all programs are compiled once.
    longest = (
        max(len(rows) for rows in given.train),
        max(*(_num_held_out(rows) for rows in given.train), *(len(rows) for rows in given.test)),
    )
    return Splits(
        _filled([first for first, _, _ in scaled], longest[0]),
        _filled([second for _, second, _ in scaled], longest[1]),
        np.asarray([scale for _, _, scale in scaled], np.float32),
    )


def _standardised(
    given: RegressionSet, train: np.ndarray, test: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], float]:
    x, y = given.x[train], given.y[train]
    spread = x.std(axis=0)
    constant = spread <= 1e-9 * np.abs(x).max(axis=0)
    spread = np.where(constant, np.inf, spread)  # a constant feature is 0 in both parts
    scale = float(y.std()) or 1.0

    def part(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (given.x[rows] - x.mean(axis=0)) / spread, (given.y[rows] - y.mean()) / scale

    return part(train), part(test), scale


def _filled(parts: list[tuple[np.ndarray, np.ndarray]], longest: int) -> Rows:
    def stack(arrays: list[np.ndarray]) -> np.ndarray:
        rooms = [np.zeros((longest, *array.shape[1:]), np.float32) for array in arrays]
        for room, array in zip(rooms, arrays, strict=True):
            room[: len(array)] = array
        return np.stack(rooms)

    weights = stack([np.ones(len(y)) for _, y in parts])
    return Rows(stack([x for x, _ in parts]), stack([y for _, y in parts]), weights)


def mean_over_rows(values: jnp.ndarray, weight: jnp.ndarray) -> jnp.ndarray:
    """The mean over the rows that count."""
    return jnp.sum(values * weight) / jnp.sum(weight)
