"""Regression sets: their files, one `.npz` a set, and their splits, standardised and padded.

x          (N, D) features; constant ones carry nothing and are left out split by split.
y          (N,) targets.
train_idx  (splits, n) and test_idx (splits, m): rows of x, whole numbers; a negative index fills up a
           row where the splits differ in size.
"""

import dataclasses
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.command_line import InputError

KEYS = ("x", "y", "train_idx", "test_idx")
LEAST = 12  # training rows: fewer cannot also validate
VALIDATION = 0.2  # share of the training rows on which settings are chosen


@dataclasses.dataclass(frozen=True)
class RegressionSet:
    """One file: features (N, D), targets (N,), and for each split the rows to train on and to test."""

    name: str
    x: np.ndarray
    y: np.ndarray
    train: list[np.ndarray]
    test: list[np.ndarray]


def read_set(path: Path, splits: int) -> RegressionSet:
    """The set of a file, with its first `splits` splits."""

    def need(right: Any, said: str) -> None:
        if not right:
            raise InputError(f"{path} {said}")

    try:
        with np.load(path, allow_pickle=False) as file:
            lacking = ", ".join(key for key in KEYS if key not in file)
            need(not lacking, f"has no {lacking}; it needs {', '.join(KEYS)}")
            x, y, train, test = (file[key] for key in KEYS)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read as .npz without pickles ({error})") from error
    shapes = f"{x.shape} and {y.shape}"
    right = x.ndim == 2 and y.shape == x.shape[:1] and x.size
    need(right, f"needs x (N, D) and y (N,); got {shapes}")
    for key, array in (("x", x), ("y", y)):
        right = array.dtype.kind in "fiub" and np.isfinite(array).all()
        need(right, f"needs finite real numbers in {key}; got {array.dtype}")
    for key, rows in (("train_idx", train), ("test_idx", test)):
        right = rows.ndim == 2 and rows.dtype.kind in "iu" and rows.size
        came = f"{rows.dtype} {rows.shape}"
        need(right, f"needs whole numbers (splits, rows) in {key}; got {came}")
        most = rows.max()
        need(most < len(y), f"has {len(y)} rows, and {key} asks for row {most}")
    need(
        splits <= len(train) == len(test),
        f"has {len(train)} rows of train_idx and {len(test)} of test_idx, and --splits asks for "
        f"{splits}; it needs as many of both, and that many",
    )
    parts = [[r[r >= 0] for r in rows.astype(int)[:splits]] for rows in (train, test)]
    for number, (first, second) in enumerate(zip(*parts, strict=True)):
        split = f", split {number}:"
        need(
            len(first) >= LEAST and len(second),
            f"{split} needs {LEAST} rows to train on and one to test; got {len(first)} and "
            f"{len(second)}",
        )
        both = [*np.intersect1d(first, second)]
        right = not both and len(np.unique(first)) == len(first)
        shared = both[0] if both else "a row twice"
        need(right, f"{split} trains on what it tests, or twice on one row ({shared})")
        need(np.ptp(y[first]), f"{split} all its training targets are {y[first][0]:g}")
    return RegressionSet(path.stem, x.astype(float), y.astype(float), *parts)


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
    orders = [
        np.random.default_rng([seed, number]).permutation(rows)
        for number, rows in enumerate(given.train)
    ]
    cuts = [_num_held_out(rows) for rows in orders]
    parts = [(order[cut:], order[:cut]) for order, cut in zip(orders, cuts, strict=True)]
    return _side_by_side(given, *zip(*parts, strict=True))


def _num_held_out(rows: np.ndarray) -> int:
    return max(1, round(VALIDATION * len(rows)))


def _side_by_side(
    given: RegressionSet, train: Sequence[np.ndarray], test: Sequence[np.ndarray]
) -> Splits:
    """The splits standardised, and filled up to the same room whichever parts are asked for.

    So all programs are compiled once.
    """
    most_train = max(map(len, given.train))
    most_test = max(*map(_num_held_out, given.train), *map(len, given.test))
    filled: list[list[tuple[np.ndarray, ...]]] = [[], []]
    scales = []
    for own in zip(train, test, strict=True):
        x, y = given.x[own[0]], given.y[own[0]]
        spread = x.std(axis=0)
        constant = spread <= 1e-9 * np.abs(x).max(axis=0)
        spread = np.where(constant, np.inf, spread)  # a constant feature is 0 in both parts
        scales.append(float(y.std()) or 1.0)
        for part, rows, room in zip(filled, own, (most_train, most_test), strict=True):
            own_x = (given.x[rows] - x.mean(axis=0)) / spread
            own_y = (given.y[rows] - y.mean()) / scales[-1]
            arrays = own_x, own_y, np.ones(len(rows))
            more = room - len(rows)
            part.append(tuple(np.pad(a, [(0, more), (0, 0)][: a.ndim]) for a in arrays))
    stacked = [
        Rows(*(np.stack(a).astype(np.float32) for a in zip(*part, strict=True))) for part in filled
    ]
    return Splits(stacked[0], stacked[1], np.asarray(scales, np.float32))


def mean_over_rows(values: jnp.ndarray, weight: jnp.ndarray) -> jnp.ndarray:
    """The mean over the rows that count."""
    return jnp.sum(values * weight) / jnp.sum(weight)
