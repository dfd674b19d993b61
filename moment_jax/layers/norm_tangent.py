"""Linearised normalisation, and the covariance it gives."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance, Diagonal, Separable, TokenCorrelated
from moment_jax.covariance.numerics import nonnegative, pooled, safe_divide, safe_sqrt, weighted
from moment_jax.xla import diagonal_of, materialized, product_with_transposed


class NormTangent(NamedTuple):
    """A linearised normalisation: dx -> scale * inverse * (dx - avg(dx) - normal <normal, dx> / D).

    Without the average if it does not centre (RMS norm).
    """

    inverse: Array  # 1 / deviation, (T, 1)
    normal: Array  # the normalised mean, (T, D)
    scale: Array  # mean of the random gain, (1, D)
    centres: bool = True
    seen: tuple[ScaledBlocks, Array] | None = None
    """For a `Separable` input: its blocks, and `normal` times their features, (T, D)."""

    @property
    def gain(self) -> Array:
        """The Jacobian's diagonal part without its low-rank correction, (T, D)."""
        return self.inverse * self.scale

    @property
    def diagonal(self) -> Array:
        """The Jacobian's diagonal, (T, D)."""
        return self.gain * (1 - (self.centres + self.normal**2) / self.normal.shape[1])

    def __call__(self, change: Array) -> Array:
        """The change (T, D) of the output for a change (T, D) of the input."""
        inner = jnp.sum(self.normal * change, axis=1, keepdims=True) / change.shape[1]
        return self.gain * (self.centred(change) - self.normal * inner)

    def centred(self, array: Array) -> Array:
        """Subtract every row's average, if the normalisation centres."""
        return centred_rows(array) if self.centres else array

    def jacobian(self) -> Array:
        """Each token's Jacobian, input features first, (T, D, D)."""
        d = self.normal.shape[1]
        centre = self.centred(jnp.eye(d, dtype=self.normal.dtype))
        lost = self.normal[:, :, None] * self.normal[:, None, :] / d
        return (centre[None] - lost) * self.gain[:, None, :]

    def low_rank(self) -> tuple[Array, Array, Array]:
        """Arguments of `Covariance.map_low_rank`: gain (T, D), left and right (T, D, 2 or 1)."""
        d = self.normal.shape[1]
        lost = [jnp.ones_like(self.normal), self.normal] if self.centres else [self.normal]
        right = jnp.stack(lost, axis=-1) / d**0.5
        return self.gain, -right * self.gain[:, :, None], right

    def feature_cross(self, cov: Separable) -> Array:
        """Cov[sum_t x_td, sum_s y_se] of input and output, (D, D), for a scale of rank one."""
        assert self.seen is not None
        blocks, pulled = self.seen
        shares = weighted(pooled(cov.token_gram(), cov.pool)[:, None] * self.inverse, cov.pool)
        lost = (shares * pulled).T @ self.normal
        kept = jnp.sum(shares) * self.centred(blocks.features)
        return cov.share(kept - lost / self.normal.shape[1]) * self.scale


class TokenBlocks(NamedTuple):
    """Each token's feature covariance."""

    cov: Covariance

    def row_sums(self) -> Array:
        """Cov 1, (T, D)."""
        return self.cov.token_matvec(jnp.ones(self.cov.shape, self.cov.dtype))

    def square_trace(self) -> Array:
        """tr(Cov^2), (T, 1)."""
        ones = jnp.ones(self.cov.shape, self.cov.dtype)
        return jnp.sum(self.cov.token_square_matvec(ones), axis=1, keepdims=True)


class ScaledBlocks(NamedTuple):
    """Each token's feature covariance as its energy times one shared matrix, F / tr F.

    Exact for a `Separable` whose scale has rank one; variances stay the token's own. It takes a third
    of the products that a scale of full rank would.
    """

    energy: Array  # (T, 1)
    features: Array  # F / tr F, (D, D)

    @classmethod
    def of(cls, cov: Separable) -> ScaledBlocks:
        """The scaled blocks of a covariance."""
        features = cov.feature_gram()
        total = jnp.broadcast_to(jnp.sum(diagonal_of(features)), (1, 1))
        return cls(jnp.sum(cov.variance(), axis=1, keepdims=True), safe_divide(features, total))

    def row_sums(self) -> Array:
        """Cov 1, (T, D)."""
        return self.energy * jnp.sum(self.features, axis=0)[None, :]

    def square_trace(self) -> Array:
        """tr(Cov^2), (T, 1)."""
        return self.energy**2 * jnp.sum(self.features**2)


@singledispatch
def carry(cov: Any, tangent: NormTangent) -> Any:
    """Covariance of the normalised array."""
    return cov.map_low_rank(*tangent.low_rank())


@carry.register
def _carry_diagonal(cov: Diagonal, tangent: NormTangent) -> Diagonal:
    return Diagonal(_carried_variance(cov.variances, tangent))


@carry.register
def _carry_token_correlated(cov: TokenCorrelated, tangent: NormTangent) -> TokenCorrelated:
    """Exact variances; the token correlation is unchanged.

    Tokens lose different directions n_t, two of D, which one correlation for all features cannot hold.
    """
    variance = _carried_variance(cov.variance(), tangent)
    sign = jnp.where(cov.scale < 0, -1, 1).astype(cov.dtype)
    return TokenCorrelated(sign * safe_sqrt(variance), cov.correlation)


@carry.register
def _carry_separable(cov: Separable, tangent: NormTangent) -> Separable:
    """Exact for a scale of rank one; the token correlation is unchanged."""
    assert tangent.seen is not None
    (blocks, pulled), normal = tangent.seen, tangent.normal
    d = normal.shape[1]
    features = tangent.centred(tangent.centred(blocks.features).T)
    pulled = tangent.centred(pulled) / d
    along = jnp.sum(normal * pulled, axis=1, keepdims=True) / d
    # The features' variances over their energy, before and after removing the direction `normal`.
    before = diagonal_of(blocks.features)[None, :]
    after = diagonal_of(features)[None, :] - 2 * normal * pulled + along * normal**2
    # Lost variance is a factor, which keeps the result positive; gained variance is added.
    kept = jnp.clip(safe_divide(after, before + jnp.zeros_like(after)), 0, 1) * cov.variance()
    variance = kept + blocks.energy * nonnegative(after - before)
    variance = materialized(tangent.inverse**2 * variance)
    # Covariance of the sum: over pairs of tokens, each without its lost direction.
    inverse, token_gram = weighted(tangent.inverse, cov.pool), cov.token_gram()
    pairs = inverse * token_gram * inverse.T
    twice = (pairs * product_with_transposed(normal / d, pulled)) @ normal
    bent = normal.T @ (0.5 * twice - jnp.sum(pairs, axis=1, keepdims=True) * pulled)
    return cov.from_moments(
        variance,
        cov.fitted_token_gram(jnp.sum(variance, axis=1)),
        jnp.sum(pairs) * features + bent + bent.T,
        cov.pool,
    )


def _carried_variance(variance: Array, tangent: NormTangent) -> Array:
    """The diagonal of J diag(variance) J^T, (T, D), for uncorrelated features."""
    normal = tangent.normal
    d = normal.shape[1]

    def total(array: Array) -> Array:
        return jnp.sum(array, axis=1, keepdims=True) / d

    kept = (1 - 2 * (tangent.centres + normal**2) / d) * variance
    gained = normal**2 * total(normal**2 * variance)
    if tangent.centres:
        gained = gained + total(variance) + 2 * normal * total(normal * variance)
    # A sum of squares, up to rounding.
    return tangent.inverse**2 * nonnegative(kept + gained / d)


def centred_rows(array: Array) -> Array:
    """Subtract every row's average."""
    return array - jnp.mean(array, axis=1, keepdims=True)
