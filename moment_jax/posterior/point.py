"""`Point`: a certain array of weights."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moment_jax.covariance.fields import check_floating, register_fields
from moment_jax.posterior.base import (
    Posterior,
    check_inputs,
    check_kernel,
    check_moment,
    check_vector,
)
from moment_jax.posterior.prior import GaussianPrior, log_density

Array = jax.Array


@register_fields
@dataclasses.dataclass(frozen=True)
class Point(Posterior):
    """Point mass at `mean`: a deterministic parameter, of any shape.

    The divergence of a point mass from a density is infinite. By convention `kl` is what remains of
    it without that infinite constant: the negative log density of the prior at `mean`. So the ELBO
    of a network of points is its maximum-a-posteriori objective, and points mix with random
    weights. It is NOT a divergence: it can be negative, and must not be compared with those of
    other families.

    Args:
      mean: the weights, of any shape.

    >>> from moment_jax.posterior import GaussianPrior
    >>> kernel = Point(jnp.ones((2, 3)))
    >>> kernel.noise_variance(jnp.ones((4, 2)), jnp.ones((4, 2))).shape
    (4, 3)
    >>> print(f"{kernel.kl(GaussianPrior()):.3f}")  # 6 entries of (1 + log(2 pi)) / 2
    8.514
    """

    mean: Array

    def __post_init__(self) -> None:
        check_floating("Point(mean)", self.mean)

    def sample(self, key: Array) -> Array:
        """The weights themselves; the key is not used."""
        del key
        return jnp.asarray(self.mean)

    def marginal_variance(self) -> Array:
        """Zeros, of the mean's shape."""
        return jnp.zeros_like(self.mean)

    def kl(self, prior: GaussianPrior) -> Array:
        """-log prior(mean): the complexity term of a MAP objective, not a divergence."""
        return -log_density(prior, self.mean)

    def noise_variance(self, mean: Array, variance: Array) -> Array:
        """Zeros (..., out)."""
        check_inputs("Point", self.shape, mean.shape, variance.shape)
        dtype = jnp.result_type(self.mean, mean, variance)
        return jnp.zeros((*mean.shape[:-1], self.shape[1]), dtype)

    def noise_block(self, moment: Array) -> Array:
        """Zeros (..., out, out)."""
        check_moment("Point", self.shape, moment.shape)
        out = self.shape[1]
        return jnp.zeros((*moment.shape[:-2], out, out), jnp.result_type(self.mean, moment))

    def input_metric(self) -> Array:
        """Zeros (in,)."""
        check_kernel("Point.input_metric", self.shape)
        return jnp.zeros(self.shape[:1], self.mean.dtype)

    def rows(self, indices: Array) -> Point:
        """These rows, (N, out)."""
        check_kernel("Point.rows", self.shape)
        return Point(self.mean[indices])

    def transpose(self) -> Point:
        """The same weights, (out, in)."""
        check_kernel("Point.transpose", self.shape)
        return Point(self.mean.T)

    def vector_cov(self) -> Array:
        """Zeros (D,)."""
        check_vector("Point.vector_cov", self.shape)
        return jnp.zeros_like(self.mean)
