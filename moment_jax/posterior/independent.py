"""Beliefs of independent entries: `Point`, `Factorized` and `OutputShared`."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import fields
from moment_jax.covariance.fields import register_fields
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.posterior.base import GaussianPrior, Posterior, divergence, kernel_shape
from moment_jax.xla import diagonal_matrix, diagonal_of


class _Independent(Posterior):
    """What follows from the variance of each entry."""

    def sample(self, key: Array) -> Array:
        noise = jax.random.normal(key, self.shape, self.mean.dtype)
        return self.mean + safe_sqrt(self.marginal_variance()) * noise

    def kl(self, prior: GaussianPrior) -> Array:
        variance = self.marginal_variance()
        return divergence(prior, self.mean, variance, jnp.log(variance))

    def _of_squares(self, squares: Array) -> Array:
        """The noise (..., out) of inputs with these second moments E[x_i^2], (..., in)."""
        return squares @ self.marginal_variance()

    def _noise_variance(self, mean: Array, variance: Array) -> Array:
        return self._of_squares(variance + mean**2)

    def _noise_block(self, moment: Array) -> Array:
        return diagonal_matrix(self._of_squares(diagonal_of(moment)))

    def _input_metric(self) -> Array:
        return jnp.sum(self.marginal_variance(), axis=1)

    def rows(self, indices: Array) -> Posterior:
        return jax.tree.map(lambda leaf: leaf[indices], self)

    def transpose(self) -> Posterior:
        return jax.tree.map(jnp.transpose, self)

    def _vector_cov(self) -> Array:
        return self.marginal_variance()


@register_fields
@dataclasses.dataclass(frozen=True)
class Point(_Independent):
    """Point mass at `mean`: a deterministic parameter, of any shape.

    The KL divergence of a point mass from a density is infinite. By convention `kl` leaves out that
    infinite constant and returns the rest, the negative log density of the prior at `mean`. So the
    ELBO of a network of points is its maximum-a-posteriori objective, and points mix with random
    weights. It is NOT a divergence: it can be negative, and must not be compared with others.

    >>> print(f"{Point(jnp.ones((2, 3))).kl(GaussianPrior()):.3f}")  # 6 (1 + log(2 pi)) / 2
    8.514
    """

    mean: Array

    def __post_init__(self) -> None:
        fields.check_floating("Point(mean)", self.mean)

    def sample(self, key: Array) -> Array:
        return jnp.asarray(self.mean)

    def marginal_variance(self) -> Array:
        return jnp.zeros_like(self.mean)

    def kl(self, prior: GaussianPrior) -> Array:
        # With this in place of the log of a variance, the divergence is the negative log density.
        constant = jnp.full_like(self.mean, -1 - math.log(2 * math.pi))
        return divergence(prior, self.mean, jnp.zeros_like(self.mean), constant)

    def _of_squares(self, squares: Array) -> Array:
        return jnp.zeros((*squares.shape[:-1], self.shape[1]), jnp.result_type(self.mean, squares))


@register_fields
@dataclasses.dataclass(frozen=True)
class Factorized(_Independent):
    """Independent entries (mean field): Cov[w_io, w_jp] = [i = j][o = p] v_io.

    Mean and variance, which is not negative, are of one shape, any; else ValueError.

    >>> kernel = Factorized(jnp.zeros((2, 3)), jnp.full((2, 3), 0.25))
    >>> print(kernel.noise_variance(jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0])))
    [1.5 1.5 1.5]
    >>> print(f"{kernel.kl(GaussianPrior()):.3f}")
    1.909
    """

    mean: Array
    variance: Array

    def __post_init__(self) -> None:
        call = "Factorized(mean, variance)"
        fix = "For one variance of all entries, use jnp.full_like(mean, variance)."
        fields.check_fields(call, fix, lambda mean: [mean], self.mean, self.variance)
        fields.check_variances(call, self.variance)

    def marginal_variance(self) -> Array:
        return jnp.asarray(self.variance)


@register_fields
@dataclasses.dataclass(frozen=True)
class OutputShared(_Independent):
    """Independent entries, one variance per output unit: Cov[w_io, w_jp] = [i = j][o = p] v_o.

    This is the derivation's posterior. Its rows r are the output units here, kernels being (in, out);
    its n_c is `in`. With the prior N(0, I), `kl` is 1/2 sum_r (n_c v_r + |mu_r|^2 - n_c - n_c log v_r).

    The mean is that of a kernel, (in, out), or of an array such as (in, heads, width), cut where its
    last axes have `out` entries; the variance is (out,), not negative. ValueError if the shapes do not
    fit, as for a bias or a gain. Source: Transformer derivation, section 2 and Eq. 12.

    >>> kernel = OutputShared(jnp.zeros((2, 3)), jnp.array([0.0, 0.5, 1.0]))
    >>> print(kernel.noise_variance(jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0])))
    [0. 3. 6.]
    """

    mean: Array
    variance: Array

    def __post_init__(self) -> None:
        call = "OutputShared(mean, variance)"
        fix = "For a bias, a gain, or a variance of each entry, use Factorized(mean, variance)."

        def shapes(_: tuple[int, ...]) -> list[tuple[int, ...]]:
            return [(*self._kernel_shape[:-2], self._kernel_shape[-1])]

        fields.check_fields(call, fix, shapes, self.mean, self.variance)
        fields.check_variances(call, self.variance)

    @property
    def _kernel_shape(self) -> tuple[int, ...]:
        return kernel_shape(self.shape, jnp.shape(self.variance))

    @property
    def matrix(self) -> OutputShared:
        return OutputShared(self.mean.reshape(self._kernel_shape), self.variance)

    def marginal_variance(self) -> Array:
        variance = jnp.asarray(self.variance)[..., None, :]
        return jnp.broadcast_to(variance, self._kernel_shape).reshape(self.shape)

    def _of_squares(self, squares: Array) -> Array:
        total = jnp.sum(squares, axis=-1, keepdims=True)
        return total * jnp.broadcast_to(self.variance, (*total.shape[:-1], *self.variance.shape))

    def rows(self, indices: Array) -> OutputShared:
        return OutputShared(self.mean[indices], self.variance)

    def transpose(self) -> Factorized:
        # Transposed, every input has a variance of its own.
        return Factorized(self.mean.T, self.marginal_variance().T)
