"""`ByProjection`: base class for a structure of your own."""

from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.base import Covariance, ElementwiseGain, RandomKernel
from moment_jax.covariance.fields import sequence_shape
from moment_jax.covariance.full import Full
from moment_jax.covariance.numerics import nonnegative


class ByProjection(Covariance):
    """A structure whose operations are those of `Full`, projected, as the law of all structures says.

    A subclass defines what it keeps: `project`, from a dense covariance, and `to_dense`, back.
    Everything else then works, including attention, norms and residual sums, at the cost of `Full`.
    Override what has to be faster; the law says what each method must return.

    Assumes that projections of covariances are positive semidefinite.

    >>> import dataclasses, jax, jax.numpy as jnp
    >>> import moment_jax as mj
    >>> @mj.register_fields
    ... @dataclasses.dataclass(frozen=True)
    ... class Pairs(mj.ByProjection):
    ...     cov: jax.Array  # (T, D, T, D): tokens 2i and 2i + 1 are correlated, and no others
    ...     num_axes = 4
    ...     @classmethod
    ...     def project(cls, dense):
    ...         pair = jnp.arange(dense.shape[0]) // 2
    ...         return cls(jnp.where((pair[:, None] == pair[None])[:, None, :, None], dense, 0))
    ...     def to_dense(self):
    ...         return self.cov
    >>> kernel = mj.posterior.Factorized(jnp.eye(2), jnp.full((2, 2), 0.5))
    >>> mean, cov = mj.dense(jnp.ones((4, 2)), Pairs.zeros((4, 2)), mj.DenseParams(kernel))
    >>> print(cov.token_gram())
    [[2. 2. 0. 0.]
     [2. 2. 0. 0.]
     [0. 0. 2. 2.]
     [0. 0. 2. 2.]]
    """

    @property
    def shape(self) -> tuple[int, int]:
        t, d, _, _ = jax.eval_shape(self.to_dense).shape
        return t, d

    @property
    def dtype(self) -> jnp.dtype:
        return jax.eval_shape(self.to_dense).dtype

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
        """The same covariance as `Full`."""
        return Full(self.to_dense())

    def variance(self) -> Array:
        return nonnegative(self.full().variance())

    def token_blocks(self) -> Array:
        return self.full().token_blocks()

    def token_gram(self, metric: Array | None = None) -> Array:
        return self.full().token_gram(metric)

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
