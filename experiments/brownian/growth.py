"""How variance and displacement grow with depth, against the Brownian law."""

from typing import NamedTuple

import jax.numpy as jnp
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
    spread = jnp.var(stream - stream[:1], axis=1, ddof=1).mean(axis=(1, 2))
    steps = np.asarray(_step_variances(stream), np.float64)
    by_input = _displacements(stream)
    groups = np.array_split(np.arange(stream.shape[1]), min(GROUPS, stream.shape[1]))
    exponent = error = None
    if stream.shape[0] > 2:
        exponent = _exponent(by_input.mean(axis=1))
        error = _jackknife(
            [_exponent(np.delete(by_input, group, axis=1).mean(axis=1)) for group in groups]
        )
    largest, smallest = int(steps.argmax()), int(steps.argmin())
    without = [
        np.asarray(_step_variances(jnp.delete(stream, group, axis=1)), np.float64)
        for group in (groups if stream.shape[1] > 2 * len(groups[0]) else [])
    ]
    ratio_error = _jackknife([_log_ratio(part[largest], part[smallest]) for part in without])
    return VarianceGrowth(
        np.asarray(spread),
        np.concatenate([[0.0], np.cumsum(steps)]),
        _log_ratio(steps[largest], steps[smallest]),
        ratio_error,
        by_input.mean(axis=1),
        exponent,
        error,
    )


def _step_variances(stream: Array) -> Array:
    """Variance of each block's steps over the inputs, per feature, (L,)."""
    return jnp.var(jnp.diff(stream, axis=0), axis=1, ddof=1).mean(axis=(1, 2))


def _log_ratio(larger: float, smaller: float) -> float:
    """Their log ratio: 0 where nothing moves, +inf where only the smaller is 0."""
    if larger <= 0:
        return 0.0
    return float(np.log(larger / smaller)) if smaller > 0 else float("inf")


def _jackknife(without: list[float]) -> float:
    """The standard error of a statistic from its values without each group; nan for fewer than two."""
    count = len(without)
    if count < 2:
        return float("nan")
    return float(np.sqrt((count - 1) ** 2 / count * np.var(without, ddof=1)))


def _displacements(stream: Array) -> np.ndarray:
    """Mean squared displacement at every lag for every input, (L, N)."""
    rows = [
        jnp.mean((stream[lag:] - stream[:-lag]) ** 2, axis=(0, 2, 3))
        for lag in range(1, stream.shape[0])
    ]
    return np.asarray(jnp.stack(rows), np.float64)


def _exponent(displacement: np.ndarray) -> float:
    """Slope of the straight line through the logarithms; nan where nothing moves."""
    if np.any(displacement <= 0):
        return float("nan")
    lags = np.log(np.arange(1, len(displacement) + 1))
    return float(np.polyfit(lags, np.log(displacement), 1)[0])
