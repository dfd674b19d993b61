"""Feature Gram matrices that are formed only when somebody needs them whole."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance.base import RandomKernel
from moment_jax.covariance.numerics import weighted

Array = jax.Array


class FeatureGram(NamedTuple):
    """sum_t Cov[x_td, x_te] = basis^T inner basis + diag(diagonal), (D, D).

    Dense layers map the basis; elementwise functions scale it and add to the diagonal. So the wide
    hidden layer of a Transformer never forms its (4 D, 4 D) matrix.
    """

    inner: Array | None = None  # (R, R); None: the matrix is diagonal
    basis: Array | None = None  # (R, D); None: the identity
    diagonal: Array | None = None  # (D,); None: zero

    def dense(self) -> Array:
        """The matrix itself, (D, D)."""
        if self.inner is None:
            assert self.diagonal is not None
            return jnp.diag(self.diagonal)
        whole = self.inner
        if self.basis is not None:
            whole = self.basis.T @ (self.inner @ self.basis)
        return whole if self.diagonal is None else whole + jnp.diag(self.diagonal)

    def diag(self) -> Array:
        """Its diagonal, (D,)."""
        if self.inner is None:
            assert self.diagonal is not None
            return self.diagonal
        own = self._within_basis()
        return own if self.diagonal is None else own + self.diagonal

    def _within_basis(self) -> Array:
        """The diagonal of basis^T inner basis, (D,)."""
        assert self.inner is not None
        if self.basis is None:
            return jnp.diagonal(self.inner)
        return jnp.sum((self.inner @ self.basis) * self.basis, axis=0)

    def blocks(self, num_blocks: int) -> Array:
        """Its blocks on the diagonal, (H, D / H, D / H)."""
        if self.inner is None or self.basis is None:
            whole = self.dense()
            width = whole.shape[0] // num_blocks
            return jnp.einsum("hdhe->hde", whole.reshape(num_blocks, width, num_blocks, width))
        rank, d = self.basis.shape
        split = (rank, num_blocks, d // num_blocks)
        pulled = (self.inner @ self.basis).reshape(split)
        whole = jnp.einsum("rhd,rhe->hde", self.basis.reshape(split), pulled)
        if self.diagonal is None:
            return whole
        return whole + jax.vmap(jnp.diag)(self.diagonal.reshape(num_blocks, -1))

    def map(self, kernel: Array) -> FeatureGram:
        """That of x @ kernel."""
        if self.inner is None or self.basis is None:
            return FeatureGram(self.dense(), kernel)
        basis = self.basis @ kernel
        whole = basis.T @ (self.inner @ basis)
        if self.diagonal is not None:
            whole = whole + kernel.T @ (self.diagonal[:, None] * kernel)
        return FeatureGram(whole)

    def scaled(self, gain: Array, diag: Array) -> FeatureGram:
        """Scaled by a (D,) gain, and its diagonal raised to `diag`."""
        if self.inner is None:
            return FeatureGram(diagonal=diag)
        basis = jnp.diag(gain) if self.basis is None else self.basis * gain[None, :]
        own = gain**2 * self._within_basis()
        return FeatureGram(self.inner, basis, jnp.maximum(diag - own, 0))

    def plus(self, other: FeatureGram) -> FeatureGram:
        """The sum; formed whole unless one of the two is diagonal."""
        if other.inner is None or self.inner is None:
            diagonals = [g.diagonal for g in (self, other) if g.diagonal is not None]
            whole = self if other.inner is None else other
            return whole._replace(diagonal=sum(diagonals[1:], diagonals[0]) if diagonals else None)
        return FeatureGram(self.dense() + other.dense())


def column_noise(
    kernel: RandomKernel, mean: Array, variance: Array, pool: Array | None = None
) -> FeatureGram:
    """Feature Gram matrix of the noise of a kernel with uncorrelated entries, at inputs (T, D).

    The sum over the tokens is taken before the product with the kernel, not after it: it is cheaper.
    """
    total = jnp.sum(weighted(variance + mean**2, pool), axis=0, keepdims=True)
    return FeatureGram(diagonal=kernel.noise_variance(jnp.zeros_like(total), total)[0])
