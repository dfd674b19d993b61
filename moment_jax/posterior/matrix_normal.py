"""`MatrixNormal`: a Kronecker-factored covariance, inputs times outputs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moment_jax.covariance.fields import check_fields, check_variances, register_fields
from moment_jax.posterior.base import Posterior, check_inputs, check_kernel, check_moment
from moment_jax.posterior.linalg import nonnegative, psd_logdet, psd_sqrt
from moment_jax.posterior.prior import GaussianPrior, divergence
from moment_jax.xla import diagonal_of

Array = jax.Array


@register_fields
@dataclasses.dataclass(frozen=True)
class MatrixNormal(Posterior):
    """Matrix-normal kernel: Cov[w_io, w_jp] = A_ij B_op.

    Only the product counts: (c A, B / c) is the same belief for every c > 0.

    Args:
      mean: mean of the kernel, (in, out).
      in_cov: A, (in, in), symmetric and positive semi-definite.
      out_cov: B, (out, out), likewise.

    Raises:
      ValueError: if the shapes do not fit.

    >>> from moment_jax.posterior import GaussianPrior
    >>> in_cov = jnp.array([[1.0, 0.5], [0.5, 1.0]])
    >>> kernel = MatrixNormal(jnp.zeros((2, 3)), in_cov, jnp.eye(3))
    >>> print(kernel.noise_variance(jnp.ones((2,)), jnp.zeros((2,))))
    [3. 3. 3.]
    >>> print(f"{kernel.kl(GaussianPrior()):.3f}")  # -3 log(det A) / 2
    0.432
    """

    mean: Array
    in_cov: Array
    out_cov: Array

    def __post_init__(self) -> None:
        check_fields(
            "MatrixNormal(mean, in_cov, out_cov)",
            "For a kernel (in, out), give covariances (in, in) and (out, out); for a bias or a "
            "gain, use Factorized or FullNormal.",
            _field_shapes,
            self.mean,
            self.in_cov,
            self.out_cov,
        )
        check_variances("MatrixNormal(mean, in_cov, out_cov)", self.in_cov, "i")
        check_variances("MatrixNormal(mean, in_cov, out_cov)", self.out_cov, "o")

    @property
    def uncorrelated(self) -> bool:
        """False: entries are correlated."""
        return False

    def sample(self, key: Array) -> Array:
        """Draw mean + root(A) z root(B), as `Posterior.sample` says."""
        check_kernel("MatrixNormal.sample", self.shape)
        noise = jax.random.normal(key, self.shape, self.mean.dtype)
        return self.mean + psd_sqrt(self.in_cov) @ noise @ psd_sqrt(self.out_cov)

    def marginal_variance(self) -> Array:
        """A_ii B_oo, (in, out)."""
        check_kernel("MatrixNormal.marginal_variance", self.shape)
        return diagonal_of(self.in_cov)[:, None] * diagonal_of(self.out_cov)[None, :]

    def kl(self, prior: GaussianPrior) -> Array:
        """KL(self || prior), with log det (A kron B) = out log det A + in log det B."""
        check_kernel("MatrixNormal.kl", self.shape)
        # The log-determinant is spread over the in * out entries.
        per_entry = (
            psd_logdet(self.in_cov) / self.shape[0] + psd_logdet(self.out_cov) / self.shape[1]
        )
        spread_log = jnp.broadcast_to(per_entry, self.shape)
        return divergence(prior, self.mean, self.marginal_variance(), spread_log)

    def noise_variance(self, mean: Array, variance: Array) -> Array:
        """B_oo sum_ij (diag(variance) + mean mean^T)_ij A_ij, (..., out)."""
        check_inputs("MatrixNormal", self.shape, mean.shape, variance.shape)
        total = variance @ diagonal_of(self.in_cov) + jnp.sum((mean @ self.in_cov) * mean, axis=-1)
        return _outer(nonnegative(total), diagonal_of(self.out_cov))

    def noise_block(self, moment: Array) -> Array:
        """B_op sum_ij moment_ij A_ij, (..., out, out)."""
        check_moment("MatrixNormal", self.shape, moment.shape)
        return _outer(jnp.einsum("...ij,ij->...", moment, self.in_cov), self.out_cov)

    def input_metric(self) -> Array:
        """A_ij trace(B), (in, in)."""
        check_kernel("MatrixNormal.input_metric", self.shape)
        return self.in_cov * jnp.sum(diagonal_of(self.out_cov))

    def rows(self, indices: Array) -> MatrixNormal:
        """These rows, (N, out)."""
        check_kernel("MatrixNormal.rows", self.shape)
        in_cov = self.in_cov[indices][:, indices]
        return MatrixNormal(self.mean[indices], in_cov, self.out_cov)

    def transpose(self) -> MatrixNormal:
        """The same weights, (out, in)."""
        check_kernel("MatrixNormal.transpose", self.shape)
        return MatrixNormal(self.mean.T, self.out_cov, self.in_cov)


def _outer(total: Array, cov: Array) -> Array:
    """(...,) times an array: (..., *cov.shape)."""
    shape = (*total.shape, *cov.shape)
    return jnp.expand_dims(total, range(total.ndim, len(shape))) * jnp.broadcast_to(cov, shape)


def _field_shapes(mean: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(mean) < 2:
        raise ValueError("needs the mean of a kernel, of shape (in, out).")
    *stack, num_in, num_out = mean
    return [(*stack, num_in, num_in), (*stack, num_out, num_out)]
