"""The Gram matrices from which `Separable` is built, and which it passes on."""

from __future__ import annotations

from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.base import Covariance, check_dense
from moment_jax.covariance.fields import FormedLater
from moment_jax.covariance.numerics import (
    correlation_of,
    definite,
    gram,
    nonnegative,
    safe_sqrt,
    vector_variance,
)
from moment_jax.xla import (
    diagonal_matrix,
    diagonal_of,
    materialized,
    materialized_inputs,
)

NARROW = 12  # up to this many features `from_crossed` restores positive semidefiniteness


class Basis(NamedTuple):
    """A map from an inner matrix (R, R) to D features, with its cached product."""

    rows: Array  # (R, D)
    pulled: Array  # inner rows, (R, D)

    def scaled(self, gain: Array) -> Basis:
        """Multiply each feature by its gain, (D,)."""
        return Basis(self.rows * gain[None, :], self.pulled * gain[None, :])


class FeatureGram(NamedTuple):
    """Cov[sum_t p_t x_t] = basis^T inner basis + diag(diagonal), (D, D).

    Dense layers map the basis; elementwise functions scale it and add to the diagonal. So the (4 D, 4
    D) matrix of a Transformer's hidden layer is never formed.
    """

    inner: Array | None = None  # (R, R); None: the matrix is diagonal
    basis: Basis | None = None  # (R, D); None: the identity
    diagonal: Array | None = None  # (D,); None: zero
    variance: Array | None = None  # (D,), the diagonal of the whole matrix, if known
    reached: Array | None = None  # the basis (R, D) that `map` last multiplied out

    @classmethod
    def through(cls, inner: Array, basis: Array) -> FeatureGram:
        """The Gram matrix of x @ basis, from that of x, (R, R)."""
        return cls(inner, Basis(basis, materialized(inner @ basis)))

    def dense(self) -> Array:
        """The matrix itself, (D, D)."""
        if self.inner is None:
            assert self.diagonal is not None
            return diagonal_matrix(self.diagonal)
        whole = self.inner
        if self.basis is not None:
            whole = self.basis.rows.T @ self.basis.pulled
        return whole if self.diagonal is None else whole + diagonal_matrix(self.diagonal)

    def diag(self) -> Array:
        """Its diagonal, (D,)."""
        if self.variance is not None:
            return self.variance
        if self.inner is None:
            assert self.diagonal is not None
            return self.diagonal
        if self.basis is None:
            own = diagonal_of(self.inner)
        else:
            own = jnp.sum(self.basis.pulled * self.basis.rows, axis=0)
        return own if self.diagonal is None else own + self.diagonal

    def blocks(self, num_blocks: int) -> Array:
        """Diagonal blocks, (H, D / H, D / H)."""
        if self.basis is None:
            whole = self.dense()
            width = whole.shape[0] // num_blocks
            return jnp.einsum("hdhe->hde", whole.reshape(num_blocks, width, num_blocks, width))
        rank, d = self.basis.rows.shape
        rows, pulled = (part.reshape(rank, num_blocks, d // num_blocks) for part in self.basis)
        whole = jnp.einsum("rhd,rhe->hde", rows, pulled)
        if self.diagonal is None:
            return whole
        return whole + diagonal_matrix(self.diagonal.reshape(num_blocks, -1))

    def map(self, kernel: Array) -> FeatureGram:
        """The Gram matrix of x @ kernel."""
        if self.inner is None or self.basis is None:
            return FeatureGram.through(self.dense(), kernel)
        basis = self.basis.rows @ kernel
        whole = gram(basis.T, self.inner)
        if self.diagonal is not None:
            # Stored, since a batch's derivatives by it are summed before they are transposed.
            whole = whole + gram(materialized(kernel.T), self.diagonal)
        return FeatureGram(whole, reached=basis)

    def rescaled(self, gain: Array) -> FeatureGram:
        """The Gram matrix of x * gain, gain (D,)."""
        diagonal, variance = (
            None if part is None else gain**2 * part for part in (self.diagonal, self.variance)
        )
        if self.inner is None or self.basis is not None:
            basis = None if self.basis is None else self.basis.scaled(gain)
            return FeatureGram(self.inner, basis, diagonal, variance)
        return FeatureGram(gain[:, None] * self.inner * gain[None, :], None, diagonal, variance)

    def without_noise(self) -> FeatureGram:
        """The matrix without the added diagonal."""
        return self._replace(diagonal=None, variance=None)

    def times(self, factor: Array) -> FeatureGram:
        """The matrix times a scalar."""
        basis, parts = self.basis, (self.inner, self.diagonal, self.variance)
        inner, diagonal, variance = (None if part is None else factor * part for part in parts)
        if basis is not None:
            basis = basis._replace(pulled=factor * basis.pulled)
        return FeatureGram(inner, basis, diagonal, variance)

    def raised(self, diagonal: Array) -> FeatureGram:
        """The matrix plus diag(diagonal), (D,)."""
        total = diagonal if self.diagonal is None else self.diagonal + diagonal
        return self._replace(diagonal=total, variance=self.diag() + diagonal)

    def plus(self, other: FeatureGram) -> FeatureGram:
        """The sum; dense unless one of the two is diagonal."""
        if other.inner is None or self.inner is None:
            diagonals = [g.diagonal for g in (self, other) if g.diagonal is not None]
            whole = self if other.inner is None else other
            total = sum(diagonals[1:], diagonals[0]) if diagonals else None
            return whole._replace(diagonal=total, variance=self.diag() + other.diag())
        return FeatureGram(self.dense() + other.dense())


class Grams(NamedTuple):
    """Known Gram matrices of a `Separable`; dropped at transformation boundaries."""

    variance: Array  # (T, D)
    tokens: Array  # (T, T)
    features: FeatureGram


class MadeOfGrams(FormedLater, Covariance):
    """The constructors of `Separable`."""

    @classmethod
    def project(cls, dense: Array) -> Self:
        check_dense(dense)
        return cls.from_moments(
            jnp.einsum("tdtd->td", dense),
            jnp.einsum("tdsd->ts", dense),
            jnp.einsum("tdse->de", dense),
        )

    @classmethod
    @materialized_inputs
    def from_moments(
        cls,
        variance: Array,
        token_gram: Array,
        feature_gram: Array | FeatureGram,
        pool: Array | None = None,
    ) -> Self:
        """Build from variances (T, D), token Gram matrix (T, T) and covariance of the sum (D, D)."""
        variance = materialized(nonnegative(variance))
        token_gram = materialized(token_gram)
        if not isinstance(feature_gram, FeatureGram):
            feature_gram = FeatureGram(materialized(feature_gram))
        total = nonnegative(feature_gram.diag())
        grams = Grams(variance, token_gram, feature_gram._replace(variance=total))
        later = {
            "scale": lambda: safe_sqrt(variance),
            "token_correlation": lambda: correlation_of(token_gram, diagonal_of(token_gram)),
            "feature_correlation": lambda: correlation_of(grams.features.dense()),
        }
        return cls.formed(later, grams=grams, pool=pool, sum_variance=total)

    @classmethod
    def from_crossed(
        cls,
        variance: Array,
        token_gram: Array,
        feature_gram: Array | FeatureGram,
        pool: Array | None = None,
    ) -> Self:
        """`from_moments` for sums whose cross terms were averaged over tokens or features.

        With few features such averages can leave Gram matrices indefinite; their off-diagonals are then
        shrunk. With more than `NARROW` features none was indefinite in 1,000 random attentions and
        blocks, and there is no check.
        """
        if variance.shape[1] <= NARROW:
            if isinstance(feature_gram, FeatureGram):
                feature_gram = feature_gram.dense()
            token_gram, feature_gram = definite(token_gram), definite(feature_gram)
        return cls.from_moments(variance, token_gram, feature_gram, pool)

    @classmethod
    def shared(cls, num_tokens: int, cov: Array) -> Self:
        variance = vector_variance(cov)
        return cls.from_moments(
            jnp.broadcast_to(variance[None, :], (num_tokens, *variance.shape)),
            jnp.broadcast_to(jnp.sum(variance), (num_tokens, num_tokens)),
            FeatureGram(diagonal=num_tokens**2 * cov) if cov.ndim == 1 else num_tokens**2 * cov,
        )

    @classmethod
    def independent(cls, variance: Array) -> Self:
        return cls.from_moments(
            variance,
            diagonal_matrix(jnp.sum(variance, axis=1)),
            FeatureGram(diagonal=jnp.sum(variance, axis=0)),
        )
