"""`Diagonal`: variances only, T D numbers."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.base import Covariance, RandomKernel
from moment_jax.covariance.fields import check_dense, check_fields, check_variances, register_fields
from moment_jax.covariance.numerics import safe_divide, safe_sqrt, vector_variance
from moment_jax.xla import diagonal_matrix


class DiagonalCross(NamedTuple):
    """Cov[x_td, z_te] within each token, as the chain of gains and kernels that leads from x to z.

    That is g0_td sum_f K1_df g1_tf K2_fe g2_te for two kernels, exact where only x's own entry of z is
    asked for. Longer chains are shortened by averaging a gain over tokens.
    """

    gains: tuple[Array, ...]  # (T, D_i), or (1, D_i) of all tokens
    kernels: tuple[Array, ...]  # one fewer, (D_i, D_{i+1}); at most two
    left: np.ndarray  # the token of each row of x, -1 for none
    right: np.ndarray  # that of each row of z

    @property
    def T(self) -> DiagonalCross:  # noqa: N802
        kernels = tuple(kernel.T for kernel in reversed(self.kernels))
        return DiagonalCross(self.gains[::-1], kernels, self.right, self.left)

    def rescale(self, gain: Array) -> DiagonalCross:
        if len(gain) > 1 and not np.array_equal(self.right, np.arange(len(self.right))):
            count = max(*map(len, self.gains), 1 + self.right.max())
            tokens = np.where(self.right < 0, count, self.right)  # a row of zeros has none
            gain = jnp.ones((count, gain.shape[1]), gain.dtype).at[tokens].set(gain, mode="drop")
        return self._replace(gains=(*self.gains[:-1], self.gains[-1] * gain))

    def map_features(self, kernel: Array) -> DiagonalCross:
        chain = self._short() if len(self.kernels) == 2 else self
        unit = jnp.ones((1, kernel.shape[1]), kernel.dtype)
        return chain._replace(gains=(*chain.gains, unit), kernels=(*chain.kernels, kernel))

    def map_each(self, kernels: Array) -> DiagonalCross:
        return self.map_features(jnp.mean(kernels, axis=0))

    def map_tokens(self, weights: Array) -> DiagonalCross | None:
        """What other tokens tell is not held."""
        if weights.shape[0] != weights.shape[1]:
            return None
        return self.rescale(jnp.broadcast_to(jnp.diagonal(weights)[:, None], self._shape))

    def take(self, rows: np.ndarray, columns: np.ndarray) -> DiagonalCross:
        found, size = self._replace(right=np.where(rows < 0, -1, self.right[rows])), self._shape[1]
        if np.array_equal(columns, np.arange(size)):
            return found
        return found.map_features(jax.nn.one_hot(columns, size, dtype=self.gains[0].dtype).T)

    def add(self, other: DiagonalCross) -> DiagonalCross:
        """Of two ways from x to z; each is first shortened to one kernel, unless neither has any."""
        if not self.kernels and not other.kernels:
            return self._replace(gains=(self.gains[0] + other.gains[0],))
        both = self._short(), other._short()
        first, more = (x.kernels[0] * jnp.mean(x.gains[1], axis=0, keepdims=True) for x in both)
        # One gain for the entries of x in both.
        gain, another = (x.gains[0] for x in both)
        ratio = safe_divide(jnp.mean(another, axis=0), jnp.mean(gain, axis=0))
        only = self._replace(gains=(gain,), kernels=())
        return only.map_features(first + ratio[:, None] * more)

    def own(self) -> Array:
        if not self.kernels:
            found = self.gains[0]
        elif len(self.kernels) == 1:
            found = self.gains[0] * self.gains[1] * jnp.diagonal(self.kernels[0])[None]
        else:
            first, middle, last = self.gains
            found = first * (middle @ (self.kernels[0].T * self.kernels[1])) * last
        here = (self.left == self.right) & (self.left >= 0)
        if here.all() and np.array_equal(self.left, np.arange(len(found))):
            return found
        return jnp.where(here[:, None], found[self.left] if len(found) > 1 else found, 0)

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.right), self.gains[-1].shape[1]

    def _short(self) -> DiagonalCross:
        """The chain with one kernel."""
        if not self.kernels:
            return self.map_features(jnp.eye(self._shape[1], dtype=self.gains[0].dtype))
        if len(self.kernels) == 1:
            return self
        first, middle, last = self.gains
        kernel = (self.kernels[0] * jnp.mean(middle, axis=0, keepdims=True)) @ self.kernels[1]
        return self._replace(gains=(first, last), kernels=(kernel,))


@register_fields
@dataclasses.dataclass(frozen=True)
class Diagonal(Covariance):
    """Variance only: Cov[x_td, x_se] = [t = s][d = e] v_td.

    Assumes that all entries are independent. Tokens share weight noise, so on a Transformer this loses
    much of the predictive variance. It is the cheapest structure: v (T, D).

    >>> import jax.numpy as jnp
    >>> cov = Diagonal(jnp.array([[1.0, 4.0]]))
    >>> print(cov.map_features(jnp.array([[1.0], [1.0]])).variance())
    [[5.]]
    """

    variances: Array

    entrywise: ClassVar[bool] = True

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

    def add(self, other: Self) -> Self:
        return self.unchecked(self.variances + other.variances)

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        return self.unchecked(weights.noise_variance(mean, self.variances))

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        return self.unchecked((self.variances + mean**2) * vector_variance(gain_cov)[None, :])

    def bias_noise(self, bias_cov: Array) -> Self:
        variance = vector_variance(bias_cov)
        return self.unchecked(jnp.broadcast_to(variance, (self.shape[0], *variance.shape)))

    def elementwise(self, moments: Any) -> Self:
        return self.unchecked(moments.variance)

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
