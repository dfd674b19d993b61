"""Regression sets with their splits: one `.npz` a set.

x          (N, D) features; constant ones carry nothing and are left out split by split.
y          (N,) targets.
train_idx  (splits, n) and test_idx (splits, m): rows of x, whole numbers; a negative index fills up a
           row where the splits differ in size.
"""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import numpy as np

from experiments.command_line import InputError

KEYS = ("x", "y", "train_idx", "test_idx")
LEAST = 12  # training rows: fewer cannot also validate


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
