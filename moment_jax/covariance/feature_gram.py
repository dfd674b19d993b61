"""Feature Gram matrices that are formed only when somebody needs them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance.base import RandomKernel
from moment_jax.xla import diagonal_matrix, diagonal_of

Array = jax.Array


class FeatureGram(NamedTuple):
    """Cov[sum_t p_t x_t] = basis^T inner basis + diag(diagonal), (D, D).

    Dense layers map the basis; elementwise functions scale it and add to the diagonal. So the wide
    hidden layer of a Transformer never forms its (4 D, 4 D) matrix.
    """

    inner: Array | None = None  # (R, R); None: the matrix is diagonal
    basis: Array | None = None  # (R, D); None: the identity
    diagonal: Array | None = None  # (D,); None: zero
    variance: Array | None = None  # (D,), the diagonal of it all, where it is known

    def dense(self) -> Array:
        """The matrix itself, (D, D)."""
        if self.inner is None:
            assert self.diagonal is not None
            return diagonal_matrix(self.diagonal)
        whole = self.inner
        if self.basis is not None:
            whole = self.basis.T @ (self.inner @ self.basis)
        return whole if self.diagonal is None else whole + diagonal_matrix(self.diagonal)

    def diag(self) -> Array:
        """Its diagonal, (D,)."""
        if self.variance is not None:
            return self.variance
        if self.inner is None:
            assert self.diagonal is not None
            return self.diagonal
        own = self._within_basis()
        return own if self.diagonal is None else own + self.diagonal

    def _within_basis(self) -> Array:
        """The diagonal of basis^T inner basis, (D,)."""
        assert self.inner is not None
        if self.basis is None:
            return diagonal_of(self.inner)
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
        return whole + diagonal_matrix(self.diagonal.reshape(num_blocks, -1))

    def map(self, kernel: Array) -> FeatureGram:
        """That of x @ kernel."""
        if self.inner is None or self.basis is None:
            return FeatureGram(self.dense(), kernel)
        basis = self.basis @ kernel
        whole = basis.T @ (self.inner @ basis)
        if self.diagonal is not None:
            whole = whole + kernel.T @ (self.diagonal[:, None] * kernel)
        return FeatureGram(whole)

    def rescaled(self, gain: Array) -> FeatureGram:
        """That of x * gain, gain (D,)."""
        diagonal, variance = (
            None if part is None else gain**2 * part for part in (self.diagonal, self.variance)
        )
        if self.inner is None or self.basis is not None:
            basis = None if self.basis is None else self.basis * gain[None, :]
            return FeatureGram(self.inner, basis, diagonal, variance)
        return FeatureGram(gain[:, None] * self.inner * gain[None, :], None, diagonal, variance)

    def shared(self, share: Callable[[Array], Array]) -> FeatureGram:
        """The matrix of which sequences share everything but the basis, which they have in common."""
        parts = (self.inner, self.diagonal, self.variance)
        inner, diagonal, variance = (None if part is None else share(part) for part in parts)
        return FeatureGram(inner, self.basis, diagonal, variance)

    def times(self, factor: Array) -> FeatureGram:
        """The matrix times a number, ()."""
        parts = (self.inner, self.diagonal, self.variance)
        inner, diagonal, variance = (None if part is None else factor * part for part in parts)
        return FeatureGram(inner, self.basis, diagonal, variance)

    def raised(self, diagonal: Array) -> FeatureGram:
        """The matrix plus a diagonal one, (D,)."""
        total = diagonal if self.diagonal is None else self.diagonal + diagonal
        return FeatureGram(self.inner, self.basis, total, self.diag() + diagonal)

    def plus(self, other: FeatureGram) -> FeatureGram:
        """The sum; formed whole unless one of the two is diagonal."""
        if other.inner is None or self.inner is None:
            diagonals = [g.diagonal for g in (self, other) if g.diagonal is not None]
            whole = self if other.inner is None else other
            total = sum(diagonals[1:], diagonals[0]) if diagonals else None
            return whole._replace(diagonal=total, variance=self.diag() + other.diag())
        return FeatureGram(self.dense() + other.dense())


def column_noise(kernel: RandomKernel, moment: Array) -> FeatureGram:
    """Feature Gram matrix of the noise of a kernel with uncorrelated entries.

    Args:
      kernel: of shape (D, O).
      moment: of the sum of the inputs over the tokens, E[(sum_t p_t x_td)^2], (D,).
    """
    moment = moment[None, :]
    return FeatureGram(diagonal=kernel.noise_variance(jnp.zeros_like(moment), moment)[0])
