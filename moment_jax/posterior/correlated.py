"""Beliefs of correlated entries: `KroneckerEigen` and `FullNormal`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import fields
from moment_jax.covariance.fields import register_fields
from moment_jax.covariance.numerics import nonnegative, safe_sqrt
from moment_jax.linalg import psd_cholesky, psd_logdet
from moment_jax.posterior.base import GaussianPrior, Posterior, divergence, kernel_shape
from moment_jax.xla import diagonal_of


@register_fields
@dataclasses.dataclass(frozen=True)
class KroneckerEigen(Posterior):
    """Kernel with independent coordinates in a Kronecker-factored basis, w = mean + U z W^T.

    Cov[w_io, w_jp] = sum_ab U_ia U_ja W_ob W_pb v_ab: each pair of directions has a variance of its own,
    as the posterior of `mj.laplace` needs. A matrix-normal kernel, Cov[w_io, w_jp] = A_ij B_op, is the
    case v_ab = a_a b_b with a, U = jnp.linalg.eigh(A) and b, W = jnp.linalg.eigh(B).

    Args:
      mean: of the kernel, (in, out), or of an array such as (in, heads, width), as in `OutputShared`.
      in_basis: U, (in, in), orthogonal, a direction in each column; or rows of such a matrix, (in, A).
      out_basis: W, (out, out), likewise; or (out, B).
      variance: v, (in, out), or (A, B), not negative.

    ValueError if the shapes do not fit, or the rows of a known basis are not orthonormal. Source: George
    et al., "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis" (2018).
    """

    mean: Array
    in_basis: Array
    out_basis: Array
    variance: Array
    uncorrelated = False

    def __post_init__(self) -> None:
        call = "KroneckerEigen(mean, in_basis, out_basis, variance)"
        fix = (
            "For a kernel (in, out), give bases (in, in) and (out, out) and variances (in, out); for a "
            "bias or a gain, use Factorized or FullNormal."
        )
        width = getattr(self.variance, "shape", (0, 0))[-2:]

        def shapes(_: tuple[int, ...]) -> list[tuple[int, ...]]:
            *stack, rows, columns = self._kernel_shape
            return [(*stack, rows, *width[:1]), (*stack, columns, *width[1:]), (*stack, *width)]

        bases = self.in_basis, self.out_basis
        fields.check_fields(call, fix, shapes, self.mean, *bases, self.variance)
        fields.check_variances(call, self.variance)
        for basis in map(fields.known_values, bases):
            if basis is not None and basis.ndim > 1:
                gram = basis @ np.swapaxes(basis, -1, -2)
                error = np.max(np.abs(gram - np.eye(basis.shape[-2])), initial=0)
                right = not error > 100 * jnp.finfo(basis.dtype).eps ** 0.5
                came = f"products that differ from the identity by {error:.3g}"
                mend = "Take them from numpy.linalg.eigh."
                fields.need(call, right, "bases with orthonormal rows", came, mend)

    @property
    def _kernel_shape(self) -> tuple[int, ...]:
        return kernel_shape(self.shape, jnp.shape(self.out_basis)[:-1])

    @property
    def matrix(self) -> KroneckerEigen:
        return dataclasses.replace(self, mean=self.mean.reshape(self._kernel_shape))

    def sample(self, key: Array) -> Array:
        self._check_one("sample")
        noise = jax.random.normal(key, self.variance.shape, self.mean.dtype)
        if self.variance.shape == self._kernel_shape:  # the symmetric root
            noise = self.in_basis.T @ noise @ self.out_basis
        deviation = self.in_basis @ (safe_sqrt(self.variance) * noise) @ self.out_basis.T
        return self.mean + deviation.reshape(self.shape)

    def marginal_variance(self) -> Array:
        self._check_one("marginal_variance")
        return (self.in_basis**2 @ self.variance @ (self.out_basis**2).T).reshape(self.shape)

    def kl(self, prior: GaussianPrior) -> Array:
        self._check_one("kl")
        if self.variance.shape != self._kernel_shape:
            return FullNormal(self.mean, self.dense_cov()).kl(prior)
        log_variance = jnp.log(self.variance).reshape(self.shape)
        return divergence(prior, self.mean, self.marginal_variance(), log_variance)

    def dense_cov(self) -> Array:
        """Cov[w_io, w_jp], (in, out, in, out), in general twice the mean's shape."""
        u, w = self.in_basis, self.out_basis
        dense = jnp.einsum("ia,ob,ab,ja,pb->iojp", u, w, self.variance, u, w)
        return dense.reshape(2 * self.shape)

    def _check_one(self, method: str) -> None:
        right, mend = self.variance.ndim == 2, "For a stack of beliefs, use jax.vmap."
        self._need(method, right, "one belief, about a kernel", self.shape, mend)

    def _noise_variance(self, mean: Array, variance: Array) -> Array:
        squares = (mean @ self.in_basis) ** 2 + variance @ self.in_basis**2
        return squares @ self.variance @ (self.out_basis**2).T

    def _noise_block(self, moment: Array) -> Array:
        diagonal = jnp.einsum("...ij,ia,ja->...a", moment, self.in_basis, self.in_basis)
        weights = diagonal @ self.variance
        return jnp.einsum("...b,ob,pb->...op", weights, self.out_basis, self.out_basis)

    def _input_metric(self) -> Array:
        total = self.variance @ jnp.sum(self.out_basis**2, axis=0)
        return (self.in_basis * total[None, :]) @ self.in_basis.T

    def rows(self, indices: Array) -> KroneckerEigen:
        return self.part(indices, slice(None))

    def part(self, rows: Any, columns: Any) -> KroneckerEigen:
        """The belief about these distinct rows and columns."""
        mean = self.mean[rows][:, columns]
        return KroneckerEigen(mean, self.in_basis[rows], self.out_basis[columns], self.variance)

    def transpose(self) -> KroneckerEigen:
        return KroneckerEigen(self.mean.T, self.out_basis, self.in_basis, self.variance.T)


@register_fields
@dataclasses.dataclass(frozen=True)
class FullNormal(Posterior):
    """Gaussian with an arbitrary dense covariance, for small arrays.

    The mean is (in, out) for a kernel, (D,) for a bias or a gain, or of any shape. The covariance has
    its shape twice, Cov[w_io, w_jp] for a kernel; it is symmetric and positive semi-definite as a
    matrix. ValueError if the shapes do not fit.

    >>> bias = FullNormal(jnp.zeros((2,)), jnp.array([[1.0, 0.5], [0.5, 1.0]]))
    >>> print(f"{bias.kl(GaussianPrior()):.3f}")  # -log(0.75) / 2
    0.144
    """

    mean: Array
    cov: Array
    uncorrelated = False

    def __post_init__(self) -> None:
        # A stack of beliefs has leading axes that mean and cov share.
        num_axes = getattr(self.cov, "ndim", 0) - getattr(self.mean, "ndim", 0)
        call = "FullNormal(mean, cov)"
        fix = "For a kernel (in, out), cov is (in, out, in, out): use cov.reshape(2 * mean.shape)."

        def shapes(mean: tuple[int, ...]) -> list[tuple[int, ...]]:
            return [mean + (mean[-num_axes:] if num_axes > 0 else mean)]

        fields.check_fields(call, fix, shapes, self.mean, self.cov)
        fields.check_variances(call, self.cov, "abcdefgh"[: max(num_axes, 0)])

    def sample(self, key: Array) -> Array:
        root = psd_cholesky(self._matrix("sample"))
        noise = jax.random.normal(key, self.shape, self.mean.dtype)
        return self.mean + (root @ noise.ravel()).reshape(self.shape)

    def marginal_variance(self) -> Array:
        return diagonal_of(self._matrix("marginal_variance")).reshape(self.shape)

    def kl(self, prior: GaussianPrior) -> Array:
        logdet = psd_logdet(self._matrix("kl"))
        log_variance = jnp.broadcast_to(logdet / self.mean.size, self.shape)
        return divergence(prior, self.mean, self.marginal_variance(), log_variance)

    def _noise_variance(self, mean: Array, variance: Array) -> Array:
        same_output = jnp.einsum("iojo->oij", self.cov)
        half = jnp.einsum("...i,oij->...oj", mean, same_output)
        of_mean = jnp.einsum("...oj,...j->...o", half, mean)
        return nonnegative(variance @ self.marginal_variance() + of_mean)

    def _noise_block(self, moment: Array) -> Array:
        return jnp.einsum("...ij,iojp->...op", moment, self.cov)

    def _input_metric(self) -> Array:
        return jnp.einsum("iojo->ij", self.cov)

    def rows(self, indices: Array) -> FullNormal:
        return FullNormal(self.mean[indices], self.cov[indices][:, :, indices])

    def transpose(self) -> FullNormal:
        return FullNormal(self.mean.T, self.cov.transpose(1, 0, 3, 2))

    def _vector_cov(self) -> Array:
        return jnp.asarray(self.cov)

    def _matrix(self, method: str) -> Array:
        """The covariance as a matrix (n, n), n the number of entries."""
        right, mend = self.cov.ndim == 2 * self.mean.ndim, "For a stack of beliefs, use jax.vmap."
        rule = "one belief, with cov.shape == 2 * mean.shape"
        came = f"{self.cov.shape} and {self.shape}"
        self._need(method, right, rule, came, mend)
        return self.cov.reshape(self.mean.size, self.mean.size)
