"""`Diagonal`: variances only, T D numbers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.base import Covariance, RandomKernel, check_dense
from moment_jax.covariance.cross import DiagonalCross
from moment_jax.covariance.fields import check_fields, check_variances, register_fields
from moment_jax.covariance.numerics import safe_sqrt, vector_variance
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

    entrywise: ClassVar[bool] = True
    feature_axes: ClassVar[Mapping[str, int]] = {"variances": 1}

    def __post_init__(self) -> None:
        call = "Diagonal(variances)"
        check_fields(call, "For one token, pass vector[None, :].", _other_shapes, self.variances)
        check_variances(call, self.variances)

    @classmethod
    def project(cls, dense: Array) -> Self:
        check_dense(dense)
        return cls.unchecked(jnp.einsum("tdtd->td", dense))

    @classmethod
    def independent(cls, variance: Array) -> Self:
        return cls.unchecked(variance)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.variances.shape

    def variance(self) -> Array:
        return self.variances

    def to_dense(self) -> Array:
        t, d = self.shape
        return diagonal_matrix(self.variances.ravel()).reshape(t, d, t, d)

    def token_blocks(self) -> Array:
        return diagonal_matrix(self.variances)

    def token_gram(self) -> Array:
        return diagonal_matrix(jnp.sum(self.variances, axis=1))

    def rescale(self, factor: Array) -> Self:
        return self.unchecked(self.variances * factor**2)

    def map_features(self, kernel: Array) -> Self:
        return self.unchecked(self.variances @ kernel**2)

    def map_tokens(self, weights: Array) -> Self:
        return self.unchecked(weights**2 @ self.variances)

    def map_each(self, kernels: Array) -> Self:
        return self.unchecked(jnp.einsum("td,tdo->to", self.variances, kernels**2))

    def entries(self, places: np.ndarray) -> Self:
        return self.unchecked(jnp.where(places < 0, 0, self.variances.ravel()[places]))

    def add(self, *others: Self) -> Self:
        return self.unchecked(sum((other.variances for other in others), self.variances))

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        return self.unchecked(weights.noise_variance(mean, self.variances))

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        return self.unchecked((self.variances + mean**2) * vector_variance(gain_cov)[None, :])

    def bias_noise(self, bias_cov: Array) -> Self:
        variance = vector_variance(bias_cov)
        return self.unchecked(jnp.broadcast_to(variance, (self.shape[0], *variance.shape)))

    def elementwise(self, moments: Any) -> Self:
        return self.unchecked(moments.variance)

    def map_heads(self, weights: Array) -> Self:
        t, d = self.shape
        groups = self.variances.reshape(t, len(weights), -1)
        return self.unchecked(jnp.einsum("hut,thk->uhk", weights**2, groups).reshape(-1, d))

    def token_noise(self, mean: Array, weights: RandomKernel) -> Self:
        return self.unchecked(weights.noise_variance(mean.T, self.variances.T).T)

    def with_itself(self) -> DiagonalCross:
        every = np.arange(len(self.variances))
        return DiagonalCross((self.variances,), (), every, every)

    def add_branch(self, branch: Self, cross: DiagonalCross | None) -> Self:
        """The cross term is bounded entry by entry (Cauchy and Schwarz)."""
        total = self.variances + branch.variances
        if cross is not None:
            bound = safe_sqrt(self.variances) * safe_sqrt(branch.variances)
            total = total + 2 * jnp.clip(cross.own(), -bound, bound)
        return self.unchecked(total)

    def hadamard(self, other: Self, cross: DiagonalCross | None) -> Self:
        squares = 0 if cross is None else cross.own() ** 2
        return self.unchecked(self.variances * other.variances + squares)


def _other_shapes(variances: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(variances) < 2:
        raise ValueError("needs variances of shape (T, D).")
    return []
