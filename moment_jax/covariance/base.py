"""The interface of all covariance structures.

A structure is a type that holds part of the covariance of a (T, D) array; `project` maps any covariance
to it. One law defines and tests every linear operation `op`:

    op(S) == project(op(Full(S.to_dense())))

A method computes the projection of the textbook result without forming the (T, D, T, D) array.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.fields import sequence_shape
from moment_jax.covariance.numerics import nonnegative

if TYPE_CHECKING:
    from moment_jax.covariance.full import Full


class RandomKernel(Protocol):
    """Second moments of a random (D, O) kernel, for `Covariance.weight_noise`."""

    @property
    def uncorrelated(self) -> bool:
        """Whether Cov[w_io, w_jp] = 0 unless i = j and o = p."""
        ...

    def noise_variance(self, mean: Array, variance: Array) -> Array:
        """sum_ij (diag(variance) + mean mean^T)_ij Cov[w_io, w_jo]: (..., D), (..., D) -> (..., O)."""
        ...

    def noise_block(self, moment: Array) -> Array:
        """sum_ij moment_ij Cov[w_io, w_jp]: (..., D, D) -> (..., O, O)."""
        ...

    def input_metric(self) -> Array:
        """sum_o Cov[w_io, w_jo]: (D,) where it is diagonal, else (D, D)."""
        ...


class ElementwiseGain(Protocol):
    """Moments of an elementwise function of a Gaussian, for `Covariance.elementwise`."""

    @property
    def variance(self) -> Array:
        """Var[f(x)], (T, D)."""
        ...

    @property
    def gain(self) -> Array:
        """E[f'(x)], (T, D)."""
        ...

    @property
    def second(self) -> Array:
        """Var[x] E[f''(x)] / sqrt(2), the second Hermite coefficient, (T, D)."""
        ...


class Covariance(abc.ABC):
    """Covariance of a (T, D) array: T tokens in rows, D features in columns.

    A structure defines `project`, what it keeps of a dense covariance, and `to_dense`, back. Every
    operation has a default, that of `Full`, projected; attention, norms and residual sums then work too,
    at the cost of `Full`. A structure overrides what has to be faster.

    Assumes that projections of covariances are positive semidefinite.

    Subclasses are frozen pytree dataclasses and work under `jit`, `vmap`, `grad` and `scan`.
    Constructors check shapes (also while tracing) and that known variances are not negative. No other
    method checks values.

    >>> import dataclasses, jax, jax.numpy as jnp
    >>> import moment_jax as mj
    >>> @mj.register_fields
    ... @dataclasses.dataclass(frozen=True)
    ... class Pairs(mj.Covariance):
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

    num_axes: ClassVar[int] = 2  # axes of the first field, without a batch
    feature_axes: ClassVar[Mapping[str, int]] = {}  # each field's feature axis, for sharding

    @classmethod
    @abc.abstractmethod
    def project(cls, dense: Array) -> Self:
        """The part of a dense (T, D, T, D) covariance that this structure keeps."""

    @abc.abstractmethod
    def to_dense(self) -> Array:
        """Cov[x_td, x_se] as a (T, D, T, D) array."""

    def full(self) -> Full:
        """The same covariance as `Full`."""
        return _full()(self.to_dense())

    # -- constructors ---------------------------------------------------------------------------

    @classmethod
    def zeros(cls, shape: tuple[int, int], dtype: jnp.dtype | type = jnp.float32) -> Self:
        """Covariance of a constant array of this (T, D) shape."""
        return cls.project(jnp.zeros(2 * sequence_shape(cls, shape), dtype))

    @classmethod
    def shared(cls, num_tokens: int, cov: Array) -> Self:
        """Covariance of one random vector repeated at every token, such as a random bias.

        Args:
          num_tokens: T.
          cov: the vector's covariance (D, D), or variances (D,) for independent entries.
        """
        return cls.project(_full().shared(num_tokens, cov).cov)

    @classmethod
    def independent(cls, variance: Array) -> Self:
        """Covariance of independent entries with these (T, D) variances."""
        return cls.project(_full().independent(variance).cov)

    # -- queries --------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """(T, D), the shape of the array whose covariance this is."""
        t, d, _, _ = jax.eval_shape(self.to_dense).shape
        return t, d

    @property
    def dtype(self) -> jnp.dtype:
        """Floating-point type of the moments."""
        return jax.eval_shape(self.to_dense).dtype

    def variance(self) -> Array:
        """Var[x_td], (T, D), never negative."""
        return nonnegative(self.full().variance())

    def token_blocks(self) -> Array:
        """Each token's own feature covariance Cov[x_td, x_te], (T, D, D)."""
        return self.full().token_blocks()

    def token_gram(self, metric: Array | None = None) -> Array:
        """sum_ij Cov[x_ti, x_sj] metric_ij, (T, T).

        Args:
          metric: (D, D), not necessarily symmetric; (D,) for a diagonal; None for the identity.
        """
        return self.full().token_gram(metric)

    # -- linear maps ----------------------------------------------------------------------------

    def rescale(self, factor: Array) -> Self:
        """Covariance of `x * factor`, factor (T, D), or (1, D) if the same for all tokens."""
        return self.project(self.full().rescale(factor).cov)

    def map_features(self, kernel: Array) -> Self:
        """Covariance of `x @ kernel`, kernel (D, O)."""
        return self.project(self.full().map_features(kernel).cov)

    def map_tokens(self, weights: Array) -> Self:
        """Covariance of `weights @ x`, weights (U, T)."""
        return self.project(self.full().map_tokens(weights).cov)

    def map_low_rank(self, gain: Array, left: Array, right: Array) -> Self:
        """Covariance after the per-token maps x_t -> gain_t * x_t + left_t (right_t^T x_t).

        Args:
          gain: (T, D).
          left: (T, D, k).
          right: (T, D, k).
        """
        return self.project(self.full().map_low_rank(gain, left, right).cov)

    def add(self, *others: Self) -> Self:
        """Covariance of the sum of independent arrays."""
        return self.project(sum((other.to_dense() for other in others), self.to_dense()))

    # -- random parameters and nonlinearities -----------------------------------------------------

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        """The contribution of an independent random kernel W to Cov[x @ W].

        That is sum_ij (Cov[x_ti, x_sj] + mean_ti mean_sj) Cov[W_io, W_jp] (Transformer derivation,
        Prop. 2, first two terms).
        """
        return self.project(self.full().weight_noise(mean, weights).cov)

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        """The contribution to Cov[g * x] of a random gain g that all tokens share.

        That is (Cov[x_ti, x_sj] + mean_ti mean_sj) Cov[g_i, g_j]; gain_cov is (D, D) or (D,).
        """
        return self.project(self.full().gain_noise(mean, gain_cov).cov)

    def elementwise(self, moments: ElementwiseGain) -> Self:
        """Covariance of f(x), f elementwise, for Gaussian x.

        Between different entries, the first two terms of the Hermite (Mehler) expansion Cov[f(x), f(y)]
        = gain gain' c + second second' corr^2 + ...; on the diagonal, the exact variance.
        """
        return self.project(self.full().elementwise(moments).cov)


def _full() -> type[Full]:
    """`Full`, which is a subclass and therefore imported late."""
    from moment_jax.covariance.full import Full

    return Full


def check_dense(dense: Array) -> None:
    """Raise unless `dense` has the shape (T, D, T, D)."""
    if dense.ndim != 4 or dense.shape[:2] != dense.shape[2:]:
        raise ValueError(
            "A dense covariance needs the shape (T, D, T, D). Got "
            f"{tuple(dense.shape)}. For the covariance of the flattened array, use "
            "cov.reshape(T, D, T, D)."
        )
