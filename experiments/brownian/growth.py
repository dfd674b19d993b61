"""How variance and displacement grow with depth, against the Brownian law."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jax import Array

GROUPS = 20
"""Groups of inputs of the jackknife."""


class VarianceGrowth(NamedTuple):
    """Growth over L blocks, per feature and averaged over tokens; errors by a jackknife over inputs."""

    variance: np.ndarray  # (L + 1,), Var[x_l - x_0] over the inputs
    brownian_variance: np.ndarray  # (L + 1,), what it would be if steps were independent
    log_ratio: float  # log of the largest variance of a block's steps over the smallest
    log_ratio_error: float
    displacement: np.ndarray  # (L,), mean squared displacement at the lags 1 ... L
    exponent: float | None  # of displacement: 1 Brownian, 2 straight, 0 confined; None if L = 1
    exponent_error: float | None


def variance_growth(stream: Array) -> VarianceGrowth:
    """Growth of a residual stream (L + 1, N, T, D) with N >= 2 inputs."""
    if stream.ndim != 4 or stream.shape[0] < 2 or stream.shape[1] < 2:
        raise ValueError(
            "`variance_growth` needs a stream (L + 1, N, T, D) with L >= 1 and N >= 2. Got "
            f"{tuple(stream.shape)}."
        )
    paths = np.asarray(stream, np.float64)
    depth, count = len(paths) - 1, paths.shape[1]
    steps, every = np.diff(paths, axis=0), np.arange(count)
    variances = _variances(steps)
    both = [variances.argmax(), variances.argmin()]
    squares = [np.square(paths[lag:] - paths[:-lag]) for lag in range(1, depth + 1)]
    displacement = np.stack([square.mean(axis=(0, 2, 3)) for square in squares])  # (L, N)

    def log_ratio(chosen: np.ndarray) -> float:
        return _log_ratio(*_variances(steps[both][:, chosen]))

    def exponent(chosen: np.ndarray) -> float:
        return _exponent(displacement[:, chosen].mean(axis=1))

    return VarianceGrowth(
        _variances(paths - paths[:1]),
        np.concatenate([[0.0], np.cumsum(variances)]),
        log_ratio(every),
        _jackknife(log_ratio, count),
        displacement.mean(axis=1),
        exponent(every) if depth > 1 else None,
        _jackknife(exponent, count) if depth > 1 else None,
    )


def _variances(values: np.ndarray) -> np.ndarray:
    """Variance over the inputs, per feature, of each (N, T, D)."""
    return values.var(axis=1, ddof=1).mean(axis=(1, 2))


def _log_ratio(larger: float, smaller: float) -> float:
    """Their log ratio: 0 where nothing moves, +inf where only the smaller is 0."""
    if larger <= 0:
        return 0.0
    return float(np.log(larger / smaller)) if smaller > 0 else float("inf")


def _jackknife(statistic: Callable[[np.ndarray], float], count: int) -> float:
    """The standard error of a statistic of chosen inputs; nan for fewer than three inputs."""
    if count < 3:
        return float("nan")
    every = np.arange(count)
    groups = np.array_split(every, min(GROUPS, count))
    without = [statistic(np.delete(every, group)) for group in groups]
    n = len(groups)
    return float(np.sqrt((n - 1) ** 2 / n * np.var(without, ddof=1)))


def _exponent(displacement: np.ndarray) -> float:
    """Slope of the straight line through the logarithms; nan where nothing moves."""
    if np.any(displacement <= 0):
        return float("nan")
    lags = np.log(np.arange(1, len(displacement) + 1))
    return float(np.polyfit(lags, np.log(displacement), 1)[0])
