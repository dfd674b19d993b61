"""Regression sets: their files, one `.npz` a set, and their splits, standardised and padded.

x          (N, D) features; constant ones carry nothing and are left out split by split.
y          (N,) targets.
train_idx  (splits, n) and test_idx (splits, m): rows of x, whole numbers; a negative index fills up a
           row where the splits differ in size.
"""

import dataclasses
import zipfile
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


def read_sets(folder: Path, names: list[str] | None, splits: int) -> list[RegressionSet]:
    """The named sets, or all, with their first `splits` splits."""
    if not folder.is_dir():
        raise InputError(f"--data-dir {folder} is no folder; name one of .npz regression sets")
    there = sorted(path.stem for path in folder.glob("*.npz"))
    if not there:
        raise InputError(f"--data-dir {folder} holds no .npz files; see experiments uci --help")
    missing = [name for name in names or [] if name not in there]
    if missing:
        raise InputError(f"--set {missing[0]} is not in {folder}; take one of {', '.join(there)}")
    return [_read(folder / f"{name}.npz", splits) for name in dict.fromkeys(names or there)]


def _read(path: Path, splits: int) -> RegressionSet:
    try:
        with np.load(path, allow_pickle=False) as file:
            lacking = [key for key in KEYS if key not in file]
            if lacking:
                raise InputError(f"{path} has no {', '.join(lacking)}; it needs {', '.join(KEYS)}")
            x, y, train, test = (file[key] for key in KEYS)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read as .npz without pickles ({error})") from error
    _check_numbers(path, x, y)
    for key, rows in (("train_idx", train), ("test_idx", test)):
        _check_rows(path, key, rows, len(y))
    if len(train) != len(test) or len(train) < splits:
        raise InputError(
            f"{path} has {len(train)} rows of train_idx and {len(test)} of test_idx, and --splits asks "
            f"for {splits}; it needs as many of both, and that many"
        )
    pairs = [
        (first[first >= 0], second[second >= 0])
        for first, second in zip(train.astype(int)[:splits], test.astype(int)[:splits], strict=True)
    ]
    for number, (first, second) in enumerate(pairs):
        _check_split(path, number, first, second, y)
    return RegressionSet(
        path.stem, x.astype(float), y.astype(float), [p[0] for p in pairs], [p[1] for p in pairs]
    )


def _check_numbers(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    if x.ndim != 2 or y.shape != x.shape[:1] or x.size == 0:
        raise InputError(f"{path} needs x (N, D) and y (N,); got {x.shape} and {y.shape}")
    for key, array in (("x", x), ("y", y)):
        if array.dtype.kind not in "fiub" or not np.isfinite(array).all():
            raise InputError(f"{path} needs finite real numbers in {key}; got {array.dtype}")


def _check_rows(path: Path, key: str, rows: np.ndarray, count: int) -> None:
    if rows.ndim != 2 or rows.dtype.kind not in "iu" or rows.size == 0:
        raise InputError(
            f"{path} needs whole numbers (splits, rows) in {key}; got {rows.dtype} {rows.shape}"
        )
    if rows.max() >= count:
        raise InputError(f"{path} has {count} rows, and {key} asks for row {rows.max()}")


def _check_split(
    path: Path, number: int, train: np.ndarray, test: np.ndarray, y: np.ndarray
) -> None:
    if len(train) < LEAST or not len(test):
        raise InputError(
            f"{path}, split {number}: needs {LEAST} rows to train on and one to test; got "
            f"{len(train)} and {len(test)}"
        )
    both = np.intersect1d(train, test)
    if both.size or len(np.unique(train)) < len(train):
        shared = both[0] if both.size else "a row twice"
        raise InputError(
            f"{path}, split {number}: trains on what it tests, or twice on one row ({shared})"
        )
    if np.ptp(y[train]) == 0:
        raise InputError(f"{path}, split {number}: all its training targets are {y[train][0]:g}")


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
