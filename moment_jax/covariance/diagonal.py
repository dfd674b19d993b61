"""`Diagonal`: variances only, T D numbers."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.base import Covariance, ElementwiseGain, RandomKernel, check_dense
from moment_jax.covariance.fields import (
    check_fields,
    check_variances,
    register_fields,
    sequence_shape,
)
from moment_jax.covariance.low_rank import low_rank_variance
from moment_jax.covariance.numerics import vector_variance
from moment_jax.xla import diagonal_matrix


@register_fields
@dataclasses.dataclass(frozen=True)
class Diagonal(Covariance):
    """Variance only: Cov[x_td, x_se] = [t = s][d = e] v_td.

    Assumes that all entries are independent. Tokens share weight noise, so on a Transformer this loses
    much of the predictive variance. It is the cheapest structure.

    Args:
      variances: v, (T, D).

    >>> import jax.numpy as jnp
    >>> cov = Diagonal(jnp.array([[1.0, 4.0]]))
    >>> print(cov.map_features(jnp.array([[1.0], [1.0]])).variance())
    [[5.]]
    """

    variances: Array

    feature_axes: ClassVar[Mapping[str, int]] = {"variances": 1}

    def __post_init__(self) -> None:
        call = "Diagonal(variances)"
        check_fields(call, "For one token, pass vector[None, :].", _other_shapes, self.variances)
        check_variances(call, self.variances)

    @classmethod
    def zeros(cls, shape: tuple[int, int], dtype: jnp.dtype | type = jnp.float32) -> Self:
        return cls(jnp.zeros(sequence_shape(cls, shape), dtype))

    @classmethod
    def project(cls, dense: Array) -> Self:
        check_dense(dense)
        return cls(jnp.einsum("tdtd->td", dense))

    @classmethod
    def shared(cls, num_tokens: int, cov: Array) -> Self:
        variance = vector_variance(cov)
        return cls(jnp.broadcast_to(variance[None, :], (num_tokens, *variance.shape)))

    @classmethod
    def independent(cls, variance: Array) -> Self:
        return cls(variance)

    @property
    def shape(self) -> tuple[int, int]:
        t, d = self.variances.shape[:2]
        return t, d

    @property
    def dtype(self) -> jnp.dtype:
        return self.variances.dtype

    def variance(self) -> Array:
        return self.variances

    def to_dense(self) -> Array:
        t, d = self.shape
        return diagonal_matrix(self.variances.ravel()).reshape(t, d, t, d)

    def token_blocks(self) -> Array:
        return diagonal_matrix(self.variances)

    def token_gram(self, metric: Array | None = None) -> Array:
        if metric is None:
            return diagonal_matrix(jnp.sum(self.variances, axis=1))
        return diagonal_matrix(self.variances @ vector_variance(metric))

    def rescale(self, factor: Array) -> Self:
        return type(self)(self.variances * factor**2)

    def map_features(self, kernel: Array) -> Self:
        return type(self)(self.variances @ kernel**2)

    def map_tokens(self, weights: Array) -> Self:
        return type(self)(weights**2 @ self.variances)

    def map_low_rank(self, gain: Array, left: Array, right: Array) -> Self:
        return type(self)(low_rank_variance(self.variances, gain, left, right))

    def add(self, *others: Self) -> Self:
        return type(self)(sum((other.variances for other in others), self.variances))

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        return type(self)(weights.noise_variance(mean, self.variances))

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        return type(self)((self.variances + mean**2) * vector_variance(gain_cov)[None, :])

    def elementwise(self, moments: ElementwiseGain) -> Self:
        return type(self)(moments.variance)


def _other_shapes(variances: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(variances) < 2:
        raise ValueError("needs variances of shape (T, D).")
    return []
