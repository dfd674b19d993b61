"""`OutputShared`: one variance for all weights of an output unit (the derivation's posterior)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moment_jax.covariance.fields import check_fields, check_variances, register_fields
from moment_jax.covariance.numerics import safe_sqrt
from moment_jax.posterior.base import Posterior, check_inputs, check_kernel, check_moment
from moment_jax.posterior.factorized import Factorized
from moment_jax.posterior.prior import GaussianPrior, divergence
from moment_jax.xla import diagonal_matrix, diagonal_of

Array = jax.Array


@register_fields
@dataclasses.dataclass(frozen=True)
class OutputShared(Posterior):
    """Independent entries, one variance an output unit: Cov[w_io, w_jp] = [i = j][o = p] v_o.

    The derivation's rows r are the output units here, kernels being (in, out); its n_c is `in`.
    With the prior N(0, I), `kl` is its 1/2 sum_r (n_c v_r + |mu_r|^2 - n_c - n_c log v_r).

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
            _field_shapes,
            self.mean,
            self.variance,
        )
        check_variances("OutputShared(mean, variance)", self.variance)

    def sample(self, key: Array) -> Array:
        """Draw mean + sqrt(v) z, as `Posterior.sample` says."""
        noise = jax.random.normal(key, self.shape, self.mean.dtype)
        return self.mean + safe_sqrt(self.variance)[..., None, :] * noise

    def marginal_variance(self) -> Array:
        """v_o in every row, (in, out)."""
        return self._spread(self.variance)

    def kl(self, prior: GaussianPrior) -> Array:
        """KL(self || prior); for the prior N(0, I) the derivation's Eq. 12."""
        spread_log = self._spread(jnp.log(self.variance))
        return divergence(prior, self.mean, self.marginal_variance(), spread_log)

    def noise_variance(self, mean: Array, variance: Array) -> Array:
        """v_o sum_i (variance + mean^2)_i: no matmul, (..., out)."""
        check_inputs("OutputShared", self.shape, mean.shape, variance.shape)
        return self._share(jnp.sum(variance + mean**2, axis=-1))

    def noise_block(self, moment: Array) -> Array:
        """trace(moment) diag(v), (..., out, out)."""
        check_moment("OutputShared", self.shape, moment.shape)
        return diagonal_matrix(self._share(jnp.sum(diagonal_of(moment), axis=-1)))

    def input_metric(self) -> Array:
        """sum_o v_o, the same for every input, (in,)."""
        check_kernel("OutputShared.input_metric", self.shape)
        return jnp.broadcast_to(jnp.sum(self.variance), self.shape[:1])

    def rows(self, indices: Array) -> OutputShared:
        """These rows, (N, out)."""
        check_kernel("OutputShared.rows", self.shape)
        return OutputShared(self.mean[indices], self.variance)

    def transpose(self) -> Factorized:
        """The same weights, (out, in): there every input has a variance of its own."""
        check_kernel("OutputShared.transpose", self.shape)
        return Factorized(self.mean.T, self.marginal_variance().T)

    def _spread(self, per_output: Array) -> Array:
        """(out,) to (in, out)."""
        return jnp.broadcast_to(per_output[..., None, :], self.shape)

    def _share(self, total: Array) -> Array:
        """(...,) times the variances: (..., out)."""
        shape = (*total.shape, *self.variance.shape)
        return total[..., None] * jnp.broadcast_to(self.variance, shape)


def _field_shapes(mean: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(mean) < 2:
        raise ValueError("needs the mean of a kernel, of shape (in, out), and a variance (out,).")
    return [mean[:-2] + mean[-1:]]
