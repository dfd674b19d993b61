"""Regression sets: their files, one `.npz` a set, and their splits.

x          (N, D) features.
y          (N,) targets.
train_idx  (splits, n) and test_idx (splits, m): rows of x, whole numbers; a negative index fills up a
           row where the splits differ in size.
"""

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments.command_line import InputError

KEYS = ("x", "y", "train_idx", "test_idx")
LEAST = 12  # training rows: fewer cannot also validate


@dataclasses.dataclass(frozen=True)
class RegressionSet:
    """Features (N, D), targets (N,), and for each split the rows to train on and to test."""

    name: str
    x: Any  # an array, or a DataFrame
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
