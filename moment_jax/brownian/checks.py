"""Argument checks of this room; errors state the rule, the value and the fix."""

import jax
import numpy as np
from jax import Array

from moment_jax.covariance.fields import check_array

TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-3}
"""How far a row sum may be from one, by dtype: the rounding error of a sum over thousands."""


def check_points(name: str, points: Array) -> None:
    """Raise unless `points` are floating-point numbers (T, D) with T and D at least one."""
    check_array(name, points)
    if points.ndim != 2 or min(points.shape) < 1:
        raise ValueError(
            f"`{name}` needs points of shape (T, D), one in each row. Got {tuple(points.shape)}. "
            f"For a batch, use jax.vmap({name})."
        )


def check_positive(name: str, what: str, value: float | Array) -> None:
    """Raise unless a number is positive; not checked inside compiled code."""
    if not isinstance(value, jax.core.Tracer) and not np.all(np.asarray(value) > 0):
        raise ValueError(f"`{name}` needs {what} > 0. Got {value}.")


def check_stochastic(name: str, transition: Array) -> int:
    """Return T; raise unless the rows of (T, T) are probabilities (in compiled code, only the shape)."""
    shape = tuple(transition.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise ValueError(
            f"`{name}` needs a matrix of shape (T, T). Got {shape}. For a batch, use "
            f"jax.vmap({name})."
        )
    if isinstance(transition, jax.core.Tracer):
        return shape[0]
    wide = np.asarray(transition, np.float64)
    if not np.all(np.isfinite(wide)) or np.any(wide < 0):
        raise ValueError(
            f"`{name}` needs probabilities: finite entries, none negative. The smallest is "
            f"{wide.min():.3g}. To normalise weights, use "
            "mj.brownian.row_normalize(kernel); for scores, jax.nn.softmax(scores)."
        )
    sums = wide.sum(axis=1)
    row = np.argmax(np.abs(sums - 1))
    if abs(sums[row] - 1) > TOLERANCE.get(str(transition.dtype), 1e-4):
        raise ValueError(
            f"`{name}` needs rows that sum to one. Row {row} sums to {sums[row]:.6g}. Use "
            "mj.brownian.row_normalize(kernel). Entry (i, j) is the probability of i -> j: transpose a "
            "matrix whose columns sum to one."
        )
    return shape[0]
