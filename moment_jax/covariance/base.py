"""The interface of all covariance structures.

A structure is a type that holds part of the covariance of a (T, D) array; `project` maps any covariance
to it. One law defines and tests every linear operation `op`:

    op(S) == project(op(Full(S.to_dense())))

A method computes the projection of the textbook result without forming the (T, D, T, D) array.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

import jax.numpy as jnp
from jax import Array


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

    Subclasses are frozen pytree dataclasses and work under `jit`, `vmap`, `grad` and `scan`.
    Constructors check shapes (also while tracing) and that known variances are not negative. No other
    method checks values.
    """

    num_axes: ClassVar[int] = 2  # axes of the first field, without a batch
    independent_tokens: ClassVar[bool] = False  # whether different tokens are never correlated
    # For sharding: each field's feature axis, and the fields whose first axis is tokens.
    feature_axes: ClassVar[Mapping[str, int]] = {}
    token_fields: ClassVar[frozenset[str]] = frozenset()

    # -- constructors ---------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def zeros(cls, shape: tuple[int, int], dtype: jnp.dtype | type = jnp.float32) -> Self:
        """Covariance of a constant array of this (T, D) shape."""

    @classmethod
    @abc.abstractmethod
    def project(cls, dense: Array) -> Self:
        """The part of a dense (T, D, T, D) covariance that this structure keeps."""

    @classmethod
    @abc.abstractmethod
    def shared(cls, num_tokens: int, cov: Array) -> Self:
        """Covariance of one random vector repeated at every token, such as a random bias.

        Args:
          num_tokens: T.
          cov: the vector's covariance (D, D), or variances (D,) for independent entries.
        """

    @classmethod
    @abc.abstractmethod
    def independent(cls, variance: Array) -> Self:
        """Covariance of independent entries with these (T, D) variances."""

    # -- queries --------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """(T, D), the shape of the array whose covariance this is; by default of the first field."""
        shape = self._first().shape
        return shape[0], shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        """Floating-point type of the moments; by default of the first field."""
        return self._first().dtype

    def _first(self) -> Array:
        own: Any = self
        first: Array = getattr(self, dataclasses.fields(own)[0].name)
        return first

    @abc.abstractmethod
    def variance(self) -> Array:
        """Var[x_td], (T, D), never negative."""

    @abc.abstractmethod
    def to_dense(self) -> Array:
        """Cov[x_td, x_se] as a (T, D, T, D) array, for tests and small problems."""

    @abc.abstractmethod
    def token_blocks(self) -> Array:
        """Each token's own feature covariance Cov[x_td, x_te], (T, D, D)."""

    @abc.abstractmethod
    def token_gram(self, metric: Array | None = None) -> Array:
        """sum_ij Cov[x_ti, x_sj] metric_ij, (T, T).

        Args:
          metric: (D, D), not necessarily symmetric; (D,) for a diagonal; None for the identity.
        """

    # -- linear maps ----------------------------------------------------------------------------

    @abc.abstractmethod
    def rescale(self, factor: Array) -> Self:
        """Covariance of `x * factor`, factor (T, D), or (1, D) if the same for all tokens."""

    @abc.abstractmethod
    def map_features(self, kernel: Array) -> Self:
        """Covariance of `x @ kernel`, kernel (D, O)."""

    @abc.abstractmethod
    def map_tokens(self, weights: Array) -> Self:
        """Covariance of `weights @ x`, weights (U, T)."""

    @abc.abstractmethod
    def map_low_rank(self, gain: Array, left: Array, right: Array) -> Self:
        """Covariance after the per-token maps x_t -> gain_t * x_t + left_t (right_t^T x_t).

        Args:
          gain: (T, D).
          left: (T, D, k).
          right: (T, D, k).
        """

    @abc.abstractmethod
    def add(self, *others: Self) -> Self:
        """Covariance of the sum of independent arrays."""

    # -- random parameters and nonlinearities -----------------------------------------------------

    @abc.abstractmethod
    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        """The contribution of an independent random kernel W to Cov[x @ W].

        That is sum_ij (Cov[x_ti, x_sj] + mean_ti mean_sj) Cov[W_io, W_jp] (Transformer derivation,
        Prop. 2, first two terms).
        """

    @abc.abstractmethod
    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        """The contribution to Cov[g * x] of a random gain g that all tokens share.

        That is (Cov[x_ti, x_sj] + mean_ti mean_sj) Cov[g_i, g_j]; gain_cov is (D, D) or (D,).
        """

    @abc.abstractmethod
    def elementwise(self, moments: ElementwiseGain) -> Self:
        """Covariance of f(x), f elementwise, for Gaussian x.

        Between different entries, the first two terms of the Hermite (Mehler) expansion Cov[f(x), f(y)]
        = gain gain' c + second second' corr^2 + ...; on the diagonal, the exact variance.
        """


def check_dense(dense: Array) -> None:
    """Raise unless `dense` has the shape (T, D, T, D)."""
    if dense.ndim != 4 or dense.shape[:2] != dense.shape[2:]:
        raise ValueError(
            "A dense covariance needs the shape (T, D, T, D). Got "
            f"{tuple(dense.shape)}. For the covariance of the flattened array, use "
            "cov.reshape(T, D, T, D)."
        )
