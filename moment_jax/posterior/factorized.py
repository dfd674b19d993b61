"""`Factorized`: every entry independent, with a variance of its own (mean field)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moment_jax.covariance.fields import check_fields, check_variances, register_fields
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.posterior.base import (
    Posterior,
    check_inputs,
    check_kernel,
    check_moment,
    check_vector,
)
from moment_jax.posterior.prior import GaussianPrior, divergence
from moment_jax.xla import diagonal_matrix, diagonal_of

Array = jax.Array


@register_fields
@dataclasses.dataclass(frozen=True)
class Factorized(Posterior):
    """Independent entries: Cov[w_io, w_jp] = [i = j][o = p] v_io.

    Args:
      mean: mean of the weights, of any shape.
      variance: v, of the mean's shape, not negative.

    Raises:
      ValueError: if the shapes differ.

    >>> from moment_jax.posterior import GaussianPrior
    >>> kernel = Factorized(jnp.zeros((2, 3)), jnp.full((2, 3), 0.25))
    >>> kernel.sample(jax.random.key(0)).shape
    (2, 3)
    >>> print(kernel.noise_variance(jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0])))
    [1.5 1.5 1.5]
    >>> print(f"{kernel.kl(GaussianPrior()):.3f}")
    1.909
    """

    mean: Array
    variance: Array

    def __post_init__(self) -> None:
        check_fields(
            "Factorized(mean, variance)",
            "For one variance of all entries, use jnp.full_like(mean, variance).",
            lambda mean: [mean],
            self.mean,
            self.variance,
        )
        check_variances("Factorized(mean, variance)", self.variance)

    def sample(self, key: Array) -> Array:
        """Draw mean + sqrt(v) z, as `Posterior.sample` says."""
        noise = jax.random.normal(key, self.shape, self.mean.dtype)
        return self.mean + safe_sqrt(self.variance) * noise

    def marginal_variance(self) -> Array:
        """The variances themselves."""
        return jnp.asarray(self.variance)

    def kl(self, prior: GaussianPrior) -> Array:
        """KL(self || prior), the sum over entries of that of two univariate Gaussians."""
        return divergence(prior, self.mean, self.variance, jnp.log(self.variance))

    def noise_variance(self, mean: Array, variance: Array) -> Array:
        """sum_i (variance + mean^2)_i v_io: one matmul, (..., out)."""
        check_inputs("Factorized", self.shape, mean.shape, variance.shape)
        return (variance + mean**2) @ self.variance

    def noise_block(self, moment: Array) -> Array:
        """diag_o(sum_i moment_ii v_io), (..., out, out)."""
        check_moment("Factorized", self.shape, moment.shape)
        return diagonal_matrix(diagonal_of(moment) @ self.variance)

    def input_metric(self) -> Array:
        """sum_o v_io, (in,)."""
        check_kernel("Factorized.input_metric", self.shape)
        return jnp.sum(self.variance, axis=1)

    def rows(self, indices: Array) -> Factorized:
        """These rows, (N, out)."""
        check_kernel("Factorized.rows", self.shape)
        return Factorized(self.mean[indices], self.variance[indices])

    def transpose(self) -> Factorized:
        """The same weights, (out, in)."""
        check_kernel("Factorized.transpose", self.shape)
        return Factorized(self.mean.T, self.variance.T)

    def vector_cov(self) -> Array:
        """The variances themselves, (D,)."""
        check_vector("Factorized.vector_cov", self.shape)
        return jnp.asarray(self.variance)
