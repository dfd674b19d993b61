"""Gaussian expectations of the logistic function and of softplus, elementwise."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.fields import check_array
from moment_jax.covariance.numerics import safe_sqrt

_NUM_NODES = 20


def _average(fn: Callable[[Array], Array], mean: Array, variance: Array) -> Array:
    """E[fn(f)] by Gauss-Hermite quadrature, with the nodes along a new last axis."""
    check_array("bernoulli_probabilities(mean, variance)", mean)
    points, weights = np.polynomial.hermite_e.hermegauss(_NUM_NODES)
    axes = (1,) * mean.ndim + (_NUM_NODES,)
    nodes = jnp.asarray(points, mean.dtype).reshape(axes)
    shares = jnp.asarray(weights / weights.sum(), mean.dtype).reshape(axes)
    return jnp.sum(shares * fn(mean[..., None] + safe_sqrt(variance)[..., None] * nodes), axis=-1)


@jax.custom_jvp
def expected_softplus(mean: Array, variance: Array) -> Array:
    """E[log(1 + exp(f))], f ~ N(mean, variance), elementwise, by a quadrature with 20 nodes.

    Largest error over all means: 2e-6, 9e-5 and 7e-4 nats at a variance of 4, 9 and 16. Derivatives
    follow Price's theorem over the same nodes, and are exact at a variance of zero.
    """
    return _average(jax.nn.softplus, mean, variance)


@expected_softplus.defjvp
def _expected_softplus_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    slope = bernoulli_probabilities(*primals)
    curvature = _average(lambda f: jax.nn.sigmoid(f) * jax.nn.sigmoid(-f), *primals)
    return expected_softplus(*primals), slope * tangents[0] + curvature / 2 * tangents[1]


@jax.custom_jvp
def bernoulli_probabilities(mean: Array, variance: Array) -> Array:
    """Predictive probabilities E[sigmoid(f)], f ~ N(mean, variance), elementwise.

    Uses a quadrature with 20 nodes. Largest error over all means: 5e-6, 2e-4 and 1e-3 at a variance of
    4, 9 and 16. Derivatives follow Price's theorem.

    Args:
      mean: logits, any shape.
      variance: their variances, the same shape.

    Source: Transformer derivation, Eq. 1.
    """
    return _average(jax.nn.sigmoid, mean, variance)


@bernoulli_probabilities.defjvp
def _bernoulli_probabilities_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    slope = _average(lambda f: jax.nn.sigmoid(f) * jax.nn.sigmoid(-f), *primals)
    curvature = _average(
        lambda f: jax.nn.sigmoid(f) * jax.nn.sigmoid(-f) * (1 - 2 * jax.nn.sigmoid(f)), *primals
    )
    return bernoulli_probabilities(*primals), slope * tangents[0] + curvature / 2 * tangents[1]
