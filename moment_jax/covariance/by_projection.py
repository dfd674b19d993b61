"""`ByProjection`: a structure of your own, by what it keeps alone."""

from __future__ import annotations

from typing import Self

import jax
import jax.numpy as jnp

from moment_jax.covariance.base import Covariance, ElementwiseGain, RandomKernel
from moment_jax.covariance.checks import sequence_shape
from moment_jax.covariance.full import Full

Array = jax.Array


class ByProjection(Covariance):
    """A structure whose operations are those of `Full`, projected: the law of all structures itself.

    A subclass says what it keeps: `project`, from a dense covariance; `to_dense`, back; and `shape` and
    `dtype`. All else works then, attention, norms and residual sums included, at the price of `Full`.
    Override what has to be quicker; the tests of the law hold it against this.

    Assumes that the projection of a covariance is positive semidefinite.
    """

    @classmethod
    def zeros(cls, shape: tuple[int, int], dtype: jnp.dtype | type = jnp.float32) -> Self:
        return cls.project(Full.zeros(sequence_shape(cls, shape), dtype).cov)

    @classmethod
    def shared(cls, num_tokens: int, cov: Array) -> Self:
        return cls.project(Full.shared(num_tokens, cov).cov)

    @classmethod
    def independent(cls, variance: Array) -> Self:
        return cls.project(Full.independent(variance).cov)

    def full(self) -> Full:
        """The same covariance, of which nothing more will be lost."""
        return Full(self.to_dense())

    def variance(self) -> Array:
        return jnp.maximum(self.full().variance(), 0)

    def token_blocks(self) -> Array:
        return self.full().token_blocks()

    def token_gram(self, metric: Array | None = None) -> Array:
        return self.full().token_gram(metric)

    def token_matvec(self, vectors: Array) -> Array:
        return self.full().token_matvec(vectors)

    def token_square_matvec(self, vectors: Array) -> Array:
        return self.full().token_square_matvec(vectors)

    def rescale(self, factor: Array) -> Self:
        return self.project(self.full().rescale(factor).cov)

    def map_features(self, kernel: Array) -> Self:
        return self.project(self.full().map_features(kernel).cov)

    def map_tokens(self, weights: Array) -> Self:
        return self.project(self.full().map_tokens(weights).cov)

    def map_low_rank(self, gain: Array, left: Array, right: Array) -> Self:
        return self.project(self.full().map_low_rank(gain, left, right).cov)

    def add(self, *others: Self) -> Self:
        return self.project(sum((other.to_dense() for other in others), self.to_dense()))

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        return self.project(self.full().weight_noise(mean, weights).cov)

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        return self.project(self.full().gain_noise(mean, gain_cov).cov)

    def elementwise(self, moments: ElementwiseGain) -> Self:
        return self.project(self.full().elementwise(moments).cov)
