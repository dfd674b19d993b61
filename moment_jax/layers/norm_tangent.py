"""Linearised normalisation, and the covariance it gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Diagonal, Separable
from moment_jax.covariance.numerics import nonnegative, pooled, safe_divide, weighted
from moment_jax.layers.norm_noise import SharedNoise, centred_rows, row_sums
from moment_jax.xla import materialized


class NormTangent(NamedTuple):
    """A linearised normalisation: dx -> scale * inverse * (dx - avg(dx) - normal <normal, dx> / D).

    Without the average if it does not centre (RMS norm).
    """

    inverse: Array  # 1 / deviation, (T, 1)
    normal: Array  # the normalised mean, (T, D)
    scale: Array  # mean of the random gain, (1, D)
    centres: bool = True
    noise: SharedNoise | None = None  # of a `Separable` input
    linked: Array | None = None  # `normal` times its features, (T, D)

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

    def centred_linked(self) -> Array:
        """`linked`, centred if the normalisation centres."""
        assert self.linked is not None
        return self.centred(self.linked)

    def low_rank(self) -> tuple[Array, Array, Array]:
        """Arguments of `Covariance.map_low_rank`: gain (T, D), left and right (T, D, 2 or 1)."""
        d = self.normal.shape[1]
        lost = [jnp.ones_like(self.normal), self.normal] if self.centres else [self.normal]
        right = jnp.stack(lost, axis=-1) / d**0.5
        return self.gain, -right * self.gain[:, :, None], right

    def feature_cross(self, cov: Separable) -> Array:
        """Cov[sum_t x_td, sum_s y_se] of input and output, (D, D), for a scale of rank one."""
        assert self.noise is not None
        assert self.linked is not None
        shares = weighted(pooled(cov.token_gram(), cov.pool)[:, None] * self.inverse, cov.pool)
        lost = (shares * self.linked).T @ self.normal
        kept = jnp.sum(shares) * self.centred(self.noise.features)
        return (kept - lost / self.normal.shape[1]) * self.scale


def carry(cov: Any, tangent: NormTangent) -> Any:
    """Covariance of the normalised array."""
    if isinstance(cov, Diagonal):
        return Diagonal(_carried_variance(cov.variances, tangent))
    if isinstance(cov, Separable):
        return _carry_separable(cov, tangent)
    return cov.map_low_rank(*tangent.low_rank())


def _carry_separable(cov: Separable, tangent: NormTangent) -> Separable:
    """Exact for a scale of rank one; the token correlation is unchanged."""
    assert tangent.noise is not None
    noise, normal, d = tangent.noise, tangent.normal, tangent.normal.shape[1]
    pulled = tangent.centred_linked() / d
    # The features' variances over their energy, before and after removing the direction `normal`.
    before = noise.variance[None, :]
    removed = normal * (normal * (row_sums(normal * pulled) / d) - 2 * pulled)
    after = noise.centred_variance[None, :] + removed
    # Lost variance is a factor, which keeps the result positive; gained variance is added.
    gained = nonnegative(after - before)
    kept = nonnegative(after - gained) * safe_divide(jnp.ones_like(before), before)
    variance = materialized(tangent.inverse**2 * (kept * cov.variance() + noise.energy * gained))
    # Covariance of the sum: over pairs of tokens, each without its lost direction.
    inverse, token_gram = weighted(tangent.inverse, cov.pool), cov.token_gram()
    pairs = inverse * token_gram * inverse.T
    twice = (pairs * ((normal / d) @ pulled.T)) @ normal
    total = jnp.sum(pairs, axis=1, keepdims=True)
    bent = normal.T @ (0.5 * twice - total * pulled)
    return cov.from_moments(
        variance,
        cov.fitted_token_gram(jnp.sum(variance, axis=1)),
        jnp.sum(total) * noise.centred + bent + bent.T,
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
