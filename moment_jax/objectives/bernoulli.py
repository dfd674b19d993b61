"""Gaussian expectations of smooth functions, elementwise, such as the logistic function."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.fields import check_array
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.objectives.moments import Cov, check_cov, variances

_NUM_NODES = 20


def bernoulli_probabilities(mean: Array, cov: Cov) -> Array:
    """Predictive probabilities E[sigmoid(f)], f ~ N(mean, variance), elementwise.

    Uses a quadrature with 20 nodes. Largest error over all means: 5e-6, 2e-4 and 1e-3 at a variance of
    4, 9 and 16. Derivatives follow Price's theorem.

    Args:
      mean: logits, any shape.
      cov: their variances, the same shape, or a structure.

    Raises:
      ValueError: if shapes do not fit.

    Source: Transformer derivation, Eq. 1.
    """
    check_array("bernoulli_probabilities", mean)
    check_cov("bernoulli_probabilities", tuple(mean.shape), cov, (tuple(mean.shape),))
    return average(jax.nn.sigmoid, mean, variances(mean, cov))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def average(fn: Callable[[Array], Array], mean: Array, variance: Array) -> Array:
    """E[fn(f)], f ~ N(mean, variance), elementwise, by a quadrature with 20 nodes on a new last axis.

    Largest error of softplus over all means: 2e-6, 9e-5 and 7e-4 nats at a variance of 4, 9 and 16.
    Derivatives follow Price's theorem over the same nodes, and are exact at a variance of zero.
    """
    points, weights = np.polynomial.hermite_e.hermegauss(_NUM_NODES)
    axes = (1,) * mean.ndim + (_NUM_NODES,)
    nodes = jnp.asarray(points, mean.dtype).reshape(axes)
    shares = jnp.asarray(weights / weights.sum(), mean.dtype).reshape(axes)
    return jnp.sum(shares * fn(mean[..., None] + safe_sqrt(variance)[..., None] * nodes), axis=-1)


@average.defjvp
def _average_jvp(
    fn: Callable[[Array], Array], primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Price's theorem: dE[fn] = E[fn'] dmean + E[fn''] dvariance / 2."""

    def first(f: Array) -> Array:
        return jax.jvp(fn, (f,), (jnp.ones_like(f),))[1]

    def second(f: Array) -> Array:
        return jax.jvp(first, (f,), (jnp.ones_like(f),))[1]

    slope, curvature = average(first, *primals), average(second, *primals)
    return average(fn, *primals), slope * tangents[0] + curvature / 2 * tangents[1]
