"""Beliefs of independent entries: `Point`, `Factorized` and `OutputShared`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.fields import (
    check_fields,
    check_floating,
    check_variances,
    register_fields,
)
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.posterior.base import Posterior
from moment_jax.posterior.linalg import outer
from moment_jax.posterior.prior import GaussianPrior, divergence, log_density
from moment_jax.xla import diagonal_matrix, diagonal_of


@register_fields
@dataclasses.dataclass(frozen=True)
class Point(Posterior):
    """Point mass at `mean`: a deterministic parameter, of any shape.

    The KL divergence of a point mass from a density is infinite. By convention `kl` leaves out that
    infinite constant and returns the rest, the negative log density of the prior at `mean`. So the
    ELBO of a network of points is its maximum-a-posteriori objective, and points mix with random
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

    def _noise_variance(self, mean: Array, variance: Array) -> Array:
        dtype = jnp.result_type(self.mean, mean, variance)
        return jnp.zeros((*mean.shape[:-1], self.shape[1]), dtype)

    def _noise_block(self, moment: Array) -> Array:
        out = self.shape[1]
        return jnp.zeros((*moment.shape[:-2], out, out), jnp.result_type(self.mean, moment))

    def _input_metric(self) -> Array:
        return jnp.zeros(self.shape[:1], self.mean.dtype)

    def _rows(self, indices: Array) -> Point:
        return Point(self.mean[indices])

    def _transpose(self) -> Point:
        return Point(self.mean.T)

    def _vector_cov(self) -> Array:
        return jnp.zeros_like(self.mean)


@register_fields
@dataclasses.dataclass(frozen=True)
class Factorized(Posterior):
    """Independent entries (mean field): Cov[w_io, w_jp] = [i = j][o = p] v_io.

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
        """Draw mean + sqrt(v) z; see `Posterior.sample`."""
        noise = jax.random.normal(key, self.shape, self.mean.dtype)
        return self.mean + safe_sqrt(self.variance) * noise

    def marginal_variance(self) -> Array:
        """The variances themselves."""
        return jnp.asarray(self.variance)

    def kl(self, prior: GaussianPrior) -> Array:
        """KL(self || prior), a sum over entries of univariate divergences."""
        return divergence(prior, self.mean, self.variance, jnp.log(self.variance))

    def _noise_variance(self, mean: Array, variance: Array) -> Array:
        return (variance + mean**2) @ self.variance

    def _noise_block(self, moment: Array) -> Array:
        return diagonal_matrix(diagonal_of(moment) @ self.variance)

    def _input_metric(self) -> Array:
        return jnp.sum(self.variance, axis=1)

    def _rows(self, indices: Array) -> Factorized:
        return Factorized(self.mean[indices], self.variance[indices])

    def _transpose(self) -> Factorized:
        return Factorized(self.mean.T, self.variance.T)

    def _vector_cov(self) -> Array:
        return jnp.asarray(self.variance)


@register_fields
@dataclasses.dataclass(frozen=True)
class OutputShared(Posterior):
    """Independent entries, one variance per output unit: Cov[w_io, w_jp] = [i = j][o = p] v_o.

    This is the derivation's posterior. Its rows r are the output units here, kernels being (in, out);
    its n_c is `in`. With the prior N(0, I), `kl` is 1/2 sum_r (n_c v_r + |mu_r|^2 - n_c - n_c log v_r).

    Args:
      mean: mean of the kernel, (in, out).
      variance: v, (out,), not negative.

    Raises:
      ValueError: if the shapes do not fit, or if the mean is that of a bias or a gain.

    Source: Transformer derivation, section 2 and Eq. 12.

    >>> from moment_jax.posterior import GaussianPrior
    >>> kernel = OutputShared(jnp.zeros((2, 3)), jnp.array([0.0, 0.5, 1.0]))
    >>> print(kernel.noise_variance(jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0])))
    [0. 3. 6.]
    >>> print(kernel.kl(GaussianPrior()))  # a weight without variance
    inf
    """

    mean: Array
    variance: Array

    def __post_init__(self) -> None:
        check_fields(
            "OutputShared(mean, variance)",
            "For a bias, a gain, or a variance of each entry, use Factorized(mean, variance).",
            _variance_shape,
            self.mean,
            self.variance,
        )
        check_variances("OutputShared(mean, variance)", self.variance)

    def sample(self, key: Array) -> Array:
        """Draw mean + sqrt(v) z; see `Posterior.sample`."""
        noise = jax.random.normal(key, self.shape, self.mean.dtype)
        return self.mean + safe_sqrt(self.variance)[..., None, :] * noise

    def marginal_variance(self) -> Array:
        """v_o in every row, (in, out)."""
        return self._per_entry(self.variance)

    def kl(self, prior: GaussianPrior) -> Array:
        """KL(self || prior); for the prior N(0, I) the derivation's Eq. 12."""
        log_variance = self._per_entry(jnp.log(self.variance))
        return divergence(prior, self.mean, self.marginal_variance(), log_variance)

    def _noise_variance(self, mean: Array, variance: Array) -> Array:
        return outer(jnp.sum(variance + mean**2, axis=-1), self.variance)

    def _noise_block(self, moment: Array) -> Array:
        return diagonal_matrix(outer(jnp.sum(diagonal_of(moment), axis=-1), self.variance))

    def _input_metric(self) -> Array:
        return jnp.broadcast_to(jnp.sum(self.variance), self.shape[:1])

    def _rows(self, indices: Array) -> OutputShared:
        return OutputShared(self.mean[indices], self.variance)

    def _transpose(self) -> Factorized:
        # Transposed, every input has a variance of its own.
        return Factorized(self.mean.T, self.marginal_variance().T)

    def _per_entry(self, per_output: Array) -> Array:
        return jnp.broadcast_to(per_output[..., None, :], self.shape)


def _variance_shape(mean: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(mean) < 2:
        raise ValueError("needs the mean of a kernel, of shape (in, out), and a variance (out,).")
    return [mean[:-2] + mean[-1:]]
