"""Noise of a token's features, as a normalisation sees it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance, Diagonal, Separable
from moment_jax.covariance.numerics import nonnegative, safe_divide
from moment_jax.xla import diagonal_of


class InputNoise(Protocol):
    """Each token's feature covariance, with P = I - 11^T/D if the normalisation centres, else I."""

    def trace(self) -> Array:
        """tr(P Cov), (T, 1)."""
        ...

    def squares(self) -> Array:
        """tr((P Cov)^2), (T, 1)."""
        ...

    def pulled(self, normal: Array) -> Array:
        """P Cov n, (T, D), of centred rows n."""
        ...


class BlockNoise(NamedTuple):
    """Any feature covariance of each token."""

    blocks: Array  # P Cov P, (T, D, D)

    @classmethod
    def of(cls, blocks: Array, centres: bool) -> BlockNoise:
        """The noise of tokens with these feature covariances, (T, D, D)."""
        return cls(_centred_blocks(blocks, *_averages(blocks)) if centres else blocks)

    def trace(self) -> Array:
        """See `InputNoise`."""
        return jnp.sum(diagonal_of(self.blocks), axis=1, keepdims=True)

    def squares(self) -> Array:
        """See `InputNoise`."""
        return jnp.sum(self.blocks**2, axis=(1, 2))[:, None]

    def pulled(self, normal: Array) -> Array:
        """See `InputNoise`."""
        return jnp.einsum("tde,te->td", self.blocks, normal)


class VarianceNoise(NamedTuple):
    """Independent features."""

    variance: Array  # (T, D)
    centres: bool

    def trace(self) -> Array:
        """See `InputNoise`."""
        return row_sums(self.variance) - self._common()

    def squares(self) -> Array:
        """See `InputNoise`."""
        lost = 2 / self.variance.shape[1] if self.centres else 0
        return (1 - lost) * row_sums(self.variance**2) + self._common() ** 2

    def pulled(self, normal: Array) -> Array:
        """See `InputNoise`."""
        pulled = self.variance * normal
        return centred_rows(pulled) if self.centres else pulled

    def _common(self) -> Array:
        """1^T Cov 1 / D, (T, 1)."""
        return row_sums(self.variance) / self.variance.shape[1] * self.centres


class SharedNoise(NamedTuple):
    """Each token's feature covariance as its energy times one shared matrix, F / tr F.

    Exact for a `Separable` whose scale has rank one; variances stay the token's own. It takes a third
    of the products that a scale of full rank would.
    """

    energy: Array  # (T, 1)
    features: Array  # F / tr F, (D, D)
    centred: Array  # P F P / tr F, (D, D)
    variance: Array  # diagonal of `features`, (D,)
    centred_variance: Array  # of `centred`, (D,)

    @classmethod
    def of(cls, cov: Separable, centres: bool) -> SharedNoise:
        """The shared noise of a covariance."""
        gram = cov.features()
        inverse = safe_divide(jnp.ones((), cov.dtype), jnp.sum(gram.diag()))
        features, variance = gram.dense() * inverse, gram.diag() * inverse
        centred, rest = features, variance
        if centres:
            average, whole = _averages(features)
            centred = _centred_blocks(features, average, whole)
            rest = nonnegative(variance - 2 * average + whole)
        return cls(row_sums(cov.variance()), features, centred, variance, rest)

    def trace(self) -> Array:
        """See `InputNoise`."""
        return self.energy * jnp.sum(self.centred_variance)

    def squares(self) -> Array:
        """See `InputNoise`."""
        return self.energy**2 * jnp.sum(self.centred**2)


def input_noise(cov: Covariance, centres: bool) -> BlockNoise | VarianceNoise | SharedNoise:
    """The `InputNoise` of a covariance."""
    if isinstance(cov, Diagonal):
        return VarianceNoise(cov.variances, centres)
    if isinstance(cov, Separable):
        return SharedNoise.of(cov, centres)
    return BlockNoise.of(cov.token_blocks(), centres)


def centred_rows(array: Array) -> Array:
    """Subtract every row's average."""
    return array - row_sums(array) / array.shape[1]


def row_sums(array: Array) -> Array:
    """Sums over features, (T, 1)."""
    return jnp.sum(array, axis=1, keepdims=True)


def _averages(blocks: Array) -> tuple[Array, Array]:
    """Averages of the rows of symmetric matrices, (..., D), and of all entries, (...)."""
    d = blocks.shape[-1]
    average = jnp.sum(blocks, axis=-1) / d
    return average, jnp.sum(average, axis=-1) / d


def _centred_blocks(blocks: Array, average: Array, whole: Array) -> Array:
    """P blocks P, from the averages."""
    lost = average - 0.5 * whole[..., None]
    return blocks - lost[..., :, None] - lost[..., None, :]
