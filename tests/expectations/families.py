"""The elementwise functions under test and the textbook integral that they are compared with."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import ndtr

from moment_jax import expectations
from moment_jax.expectations import ElementwiseMoments


class Family(NamedTuple):
    moments: Callable[[jax.Array, jax.Array], ElementwiseMoments]
    fn: Callable[[np.ndarray], np.ndarray]  # the function itself, in numpy
    slope: Callable[[np.ndarray], np.ndarray]
    variances: tuple[float, ...]  # where the moments are meant to be exact
    exact_variance: bool = True
    kinks: tuple[float, ...] = (0.0,)


_CLOSED = (1e-8, 1e-4, 0.01, 0.06, 0.065, 0.5, 1.0, 4.0, 30.0, 100.0)
_SMOOTH = (1e-6, 0.01, 0.06, 0.065, 0.3, 1.0)


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi)


def _quadrature(fn: Callable) -> Callable[[jax.Array, jax.Array], ElementwiseMoments]:
    return partial(expectations.elementwise, fn, num_nodes=32)


_CLIP = {"kinks": (-1.0, 0.5), "slopes": (0.1, 1.0, 0.0), "value": -1.0}
FAMILIES = {
    "rectified": Family(
        expectations.rectified, lambda x: np.maximum(x, 0), lambda x: 1.0 * (x > 0), _CLOSED
    ),
    "gelu": Family(
        expectations.gelu,
        lambda x: x * ndtr(x),
        lambda x: ndtr(x) + x * _density(x),
        _CLOSED,
        False,
    ),
    "clipped": Family(
        partial(expectations.piecewise_linear, **_CLIP),
        lambda x: np.clip(x, -1, 0.5) + 0.1 * np.minimum(x + 1, 0),
        lambda x: np.where(x < -1, 0.1, 1.0 * (x < 0.5)),
        _CLOSED,
        kinks=(-1.0, 0.5),
    ),
    "sin": Family(_quadrature(jnp.sin), np.sin, np.cos, _SMOOTH),
}


def integral(family: Family, mean: float, variance: float) -> ElementwiseMoments:
    """The moments by composite Gauss-Legendre integration, with breaks at its kinks.

    second = E[f (z^2 - 1)] / sqrt(2), z = (x - m) / s, is the definition; by parts it is
    s E[f' z] / sqrt(2), which needs no second derivative and does not cancel.
    """
    scale = np.sqrt(variance)
    low, high = mean - 13 * scale, mean + 13 * scale
    edges = np.unique(np.clip(np.append(np.linspace(low, high, 261), family.kinks), low, high))
    points, weights = np.polynomial.legendre.leggauss(12)
    half = 0.5 * np.diff(edges)[:, None]
    x = (edges[:-1, None] + half * (1 + points[None, :])).ravel()
    z = (x - mean) / scale
    weight = (half * weights[None, :]).ravel() * _density(z) / scale
    value = weight @ family.fn(x)
    centred = family.fn(x) - value
    slope = family.slope(x)
    return ElementwiseMoments(
        value, weight @ centred**2, weight @ slope, scale * (weight @ (slope * z)) / np.sqrt(2)
    )


def softmax_moments(mean: jax.Array, cov: jax.Array, mask: jax.Array | None = None):
    """Mean and covariance of the softmax of a row of scores, of covariance (C, C) or (C,)."""
    cov = jnp.diag(cov) if cov.ndim == 1 else cov
    if mask is not None:
        mean = jnp.where(mask, mean, -jnp.inf)
        cov = jnp.where(mask[:, None] & mask[None, :], cov, 0)
    q, jacobian, rest = expectations.softmax_expansion(mean, cov)
    return q, jacobian @ cov @ jacobian + rest
