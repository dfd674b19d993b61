"""`FullNormal`: any covariance of the entries."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moment_jax.covariance.fields import check_fields, check_variances, register_fields
from moment_jax.posterior.base import (
    Posterior,
    check_inputs,
    check_kernel,
    check_moment,
    check_vector,
)
from moment_jax.posterior.linalg import nonnegative, psd_logdet, psd_sqrt
from moment_jax.posterior.prior import GaussianPrior, divergence
from moment_jax.xla import diagonal_of

Array = jax.Array


@register_fields
@dataclasses.dataclass(frozen=True)
class FullNormal(Posterior):
    """Gaussian with a dense covariance; assumes nothing about it. For small arrays.

    Args:
      mean: mean of the weights, (in, out) for a kernel, (D,) for a bias or a gain, or of any shape.
      cov: Cov[w_io, w_jp], (in, out, in, out), or (D, D), in general twice the mean's shape;
        symmetric and positive semi-definite as a matrix.

    Raises:
      ValueError: if the shapes do not fit.

    >>> from moment_jax.posterior import GaussianPrior
    >>> bias = FullNormal(jnp.zeros((2,)), jnp.array([[1.0, 0.5], [0.5, 1.0]]))
    >>> print(bias.vector_cov())
    [[1.  0.5]
     [0.5 1. ]]
    >>> print(f"{bias.kl(GaussianPrior()):.3f}")  # -log(0.75) / 2
    0.144
    """

    mean: Array
    cov: Array

    def __post_init__(self) -> None:
        num_axes = _axes(self.cov) - _axes(self.mean)
        check_fields(
            "FullNormal(mean, cov)",
            "For a kernel (in, out), cov is (in, out, in, out): use cov.reshape(2 * mean.shape).",
            lambda mean: [mean + (mean[-num_axes:] if num_axes > 0 else mean)],
            self.mean,
            self.cov,
        )
        check_variances("FullNormal(mean, cov)", self.cov, "abcdefgh"[: max(num_axes, 0)])

    @property
    def uncorrelated(self) -> bool:
        """False: entries are correlated."""
        return False

    def sample(self, key: Array) -> Array:
        """Draw mean + root(Cov) z, as `Posterior.sample` says."""
        root = psd_sqrt(self._matrix("sample"))
        noise = jax.random.normal(key, self.shape, self.mean.dtype)
        return self.mean + (root @ noise.ravel()).reshape(self.shape)

    def marginal_variance(self) -> Array:
        """The diagonal of the covariance, of the mean's shape."""
        return diagonal_of(self._matrix("marginal_variance")).reshape(self.shape)

    def kl(self, prior: GaussianPrior) -> Array:
        """KL(self || prior), by the Cholesky factor of the covariance."""
        logdet = psd_logdet(self._matrix("kl"))
        spread_log = jnp.broadcast_to(logdet / self.mean.size, self.shape)
        return divergence(prior, self.mean, self.marginal_variance(), spread_log)

    def noise_variance(self, mean: Array, variance: Array) -> Array:
        """sum_ij (diag(variance) + mean mean^T)_ij Cov[w_io, w_jo], (..., out)."""
        check_inputs("FullNormal", self.shape, mean.shape, variance.shape)
        same_output = jnp.einsum("iojo->oij", self.cov)
        half = jnp.einsum("...i,oij->...oj", mean, same_output)
        of_mean = jnp.einsum("...oj,...j->...o", half, mean)
        return nonnegative(variance @ self.marginal_variance() + of_mean)

    def noise_block(self, moment: Array) -> Array:
        """sum_ij moment_ij Cov[w_io, w_jp], (..., out, out)."""
        check_moment("FullNormal", self.shape, moment.shape)
        return jnp.einsum("...ij,iojp->...op", moment, self.cov)

    def input_metric(self) -> Array:
        """sum_o Cov[w_io, w_jo], (in, in)."""
        check_kernel("FullNormal.input_metric", self.shape)
        return jnp.einsum("iojo->ij", self.cov)

    def rows(self, indices: Array) -> FullNormal:
        """These rows, (N, out)."""
        check_kernel("FullNormal.rows", self.shape)
        return FullNormal(self.mean[indices], self.cov[indices][:, :, indices])

    def transpose(self) -> FullNormal:
        """The same weights, (out, in)."""
        check_kernel("FullNormal.transpose", self.shape)
        return FullNormal(self.mean.T, self.cov.transpose(1, 0, 3, 2))

    def vector_cov(self) -> Array:
        """The covariance itself, (D, D)."""
        check_vector("FullNormal.vector_cov", self.shape)
        return jnp.asarray(self.cov)

    def _matrix(self, method: str) -> Array:
        """The covariance as a matrix (n, n), n the number of entries."""
        if self.cov.ndim != 2 * self.mean.ndim:
            raise ValueError(
                f"`FullNormal.{method}` needs one belief, with cov.shape == 2 * mean.shape. Got "
                f"{self.cov.shape} and {self.shape}. For a stack of beliefs, use jax.vmap."
            )
        return self.cov.reshape(self.mean.size, self.mean.size)


def _axes(leaf: object) -> int:
    return getattr(leaf, "ndim", 0)
