"""The interface of all covariance structures.

A structure is a type that holds part of the covariance of a (T, D) array; `project` maps any covariance
to it. One law defines and tests every operation `op`:

    op(S) == project(op(Full(S.to_dense())))

The methods here are that law, at the price of `Full`: the textbook's formulas on the dense covariance,
projected. A structure overrides what it does faster; `Full` itself overrides nothing.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.fields import Shape, by_shapes, need, no_such, rebuilt, sequence_shape
from moment_jax.covariance.numerics import nonnegative, safe_divide, safe_sqrt, vector_cov
from moment_jax.xla import diagonal_matrix


class RandomKernel(Protocol):
    """Second moments of a random (D, O) kernel, for `Covariance.weight_noise`."""

    @property
    def uncorrelated(self) -> bool:
        """Whether Cov[w_io, w_jp] = 0 unless i = j and o = p."""

    def noise_variance(self, mean: Array, variance: Array) -> Array:
        """sum_ij (diag(variance) + mean mean^T)_ij Cov[w_io, w_jo]: (..., D), (..., D) -> (..., O)."""

    def noise_block(self, moment: Array) -> Array:
        """sum_ij moment_ij Cov[w_io, w_jp]: (..., D, D) -> (..., O, O)."""

    def input_metric(self) -> Array:
        """sum_o Cov[w_io, w_jo]: (D,) where it is diagonal, else (D, D)."""


def over_batch(query: Callable[[Any], Array]) -> Callable[[Any], Array]:
    """The query of every covariance in a batch, whose fields have leading axes as under `jax.vmap`."""

    @functools.wraps(query)
    def of_each(self: Any) -> Array:
        batched = jax.tree.leaves(self)[0].ndim > self.num_axes
        return jax.vmap(of_each)(self) if batched else query(self)

    return of_each


class Cross(NamedTuple):
    """Cov[x_td, z_se], dense: what `Full` and a user's own structure carry.

    Each method is what Cov[x, z] becomes by an operation on z. Other structures carry less, with the
    same methods; there None stands for a covariance that they cannot hold, which is zero.
    """

    cov: Array  # (T, D, S, E)

    @property
    def T(self) -> Cross:  # noqa: N802
        """Cov[z, x]."""
        return Cross(jnp.transpose(self.cov, (2, 3, 0, 1)))

    def rescale(self, gain: Array) -> Cross:
        """Cov[x, gain * z], gain (S, E) or (1, E)."""
        return Cross(self.cov * gain[None, None])

    def map_features(self, kernel: Array) -> Cross:
        """Cov[x, z @ kernel], kernel (E, O)."""
        return Cross(jnp.einsum("tdsi,io->tdso", self.cov, kernel))

    def map_each(self, kernels: Array) -> Cross:
        """Cov[x, z_s @ kernels_s], kernels (S, E, O)."""
        return Cross(jnp.einsum("tdsi,sio->tdso", self.cov, kernels))

    def map_tokens(self, weights: Array) -> Cross:
        """Cov[x, weights @ z], weights (U, S)."""
        return Cross(jnp.einsum("us,tdsi->tdui", weights, self.cov))

    def take(self, rows: np.ndarray, columns: np.ndarray) -> Cross:
        """Cov[x, z[rows][:, columns]]; -1 stands for zeros."""
        known = (rows >= 0)[:, None] & (columns >= 0)
        return Cross(jnp.where(known, self.cov[:, :, rows][..., columns], 0))

    def entries(self, places: np.ndarray) -> Cross:
        """Cov[x, entries of z], given their places (U, O) in the flat z; -1 stands for zeros."""
        flat = self.cov.reshape(*self.cov.shape[:2], -1)
        return Cross(jnp.where(places < 0, 0, flat[..., places]))

    def add(self, other: Cross) -> Cross:
        """Cov[x, z + y], given Cov[x, y]."""
        return Cross(self.cov + other.cov)

    def own(self) -> Array:
        """Cov[x_td, z_td], (T, D), for z of the shape of x."""
        return jnp.einsum("tdtd->td", self.cov)


class Covariance(abc.ABC):
    """Covariance of a (T, D) array: T tokens in rows, D features in columns.

    A subclass is a frozen pytree dataclass (`mj.register_fields`) that defines `project`, from a dense
    covariance, and `to_dense`, back. Everything else then works, layers included, under `jit`, `vmap`,
    `grad` and `scan`. Constructors check shapes (also while tracing) and known variances; no other
    method checks values. Queries (`variance`, `sd`, `shape`, `to_dense`, `token_blocks`, `token_gram`)
    keep leading batch axes, as under `jax.vmap`; `num_axes` is the rank of the first field without any.

    Assumes that projections of covariances are positive semidefinite.

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
    pools: ClassVar[bool] = False  # whether masked tokens must be kept out of a sum: see `seen_by`
    entrywise: ClassVar[bool] = False  # whether entries have no covariance with each other
    exact: ClassVar[bool] = False  # whether every covariance is its own projection

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("to_dense", "token_blocks", "token_gram"):
            if name in vars(cls):
                setattr(cls, name, over_batch(vars(cls)[name]))

    # -- what a structure defines -----------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def project(cls, dense: Array) -> Self:
        """The part of a dense (T, D, T, D) covariance that this structure keeps."""

    @abc.abstractmethod
    def to_dense(self) -> Array:
        """Cov[x_td, x_se] as a (..., T, D, T, D) array, for tests and small problems."""

    # -- constructors and queries -----------------------------------------------------------------

    @classmethod
    def zeros(cls, shape: Shape, dtype: Any = jnp.float32, landmarks: int | None = None) -> Self:
        """Covariance of a constant array of this (T, D) shape; `landmarks` is for `Separable`."""
        return cls.independent(jnp.zeros(sequence_shape(cls, shape), dtype))

    @classmethod
    def independent(cls, variance: Array) -> Self:
        """Covariance of independent entries with these (T, D) variances."""
        return cls.project(jnp.diag(variance.ravel()).reshape(2 * variance.shape))

    @classmethod
    def unchecked(cls, *fields: Any) -> Self:
        """An instance of these fields, without the constructor's checks."""
        instance: Self = rebuilt(cls, fields)
        return instance

    def projected(self, dense: Array) -> Self:
        """`project`, with whatever else an instance knows."""
        return self.project(dense)

    @property
    def shape(self) -> Shape:
        """(..., T, D), the shape of the array whose covariance this is."""
        return jax.eval_shape(self.to_dense).shape[:-2]

    @property
    def dtype(self) -> jnp.dtype:
        """Floating-point type of the moments."""
        return jax.tree.leaves(self)[0].dtype

    def variance(self) -> Array:
        """Var[x_td], (..., T, D), never negative."""
        return nonnegative(jnp.einsum("...tdtd->...td", self.to_dense()))

    def __array__(self, *_: Any, **__: Any) -> Any:
        """None, and no items: NumPy would make an object of it."""
        raise TypeError(
            "A covariance is not an array. Use cov.to_dense(), cov.variance() or cov.sd(); of one "
            "example of a batch, jax.tree.map(lambda x: x[0], cov)."
        )

    __getitem__ = __array__

    def sd(self) -> Array:
        """The standard deviation of each entry, (..., T, D), of single tokens for one example alone."""
        variance = self.variance()
        right, shape = variance.ndim == 2 or variance.shape[-2] > 1, variance.shape
        rule = "more than one token in a batch: else a mean without tokens would broadcast with it"
        mend = "Use moments.sd of moments = model(x), or jnp.sqrt(cov.variance()[..., 0, :])."
        need("cov.sd()", right, rule, shape, mend)
        return safe_sqrt(variance)

    def token_blocks(self) -> Array:
        """Each token's own feature covariance Cov[x_td, x_te], (..., T, D, D)."""
        return jnp.einsum("...tdte->...tde", self.to_dense())

    def token_gram(self) -> Array:
        """sum_d Cov[x_td, x_sd], (..., T, T)."""
        return jnp.einsum("...tdsd->...ts", self.to_dense())

    def at_landmarks(self, count: int | None) -> Self:
        """The same covariance, where a structure keeps what tokens share at landmark tokens alone."""
        return self

    # -- attention's masks --------------------------------------------------------------------------

    def seen_by(self, mask: Array | None, *, memory: bool = False) -> Self:
        """The covariance of keys with which a mask's unseen tokens influence no other: see `pooled`.

        The mask is (T, S), (1, S) or (H, T, S), True where a query may look, or None. With `memory` the
        keys come from another sequence than the queries.
        """
        return self

    def pooled(self, pool: Array) -> Self:
        """The same covariance, what it holds of a sum over tokens from now on that of sum_t pool_t x_t.

        Tokens of weight zero (padding, or later ones) then have no influence on the others.
        """
        return self

    def check_mask(self, call: str, mask: Array) -> None:
        """Raise if keys of this covariance cannot be told apart as attention's mask asks."""
        del call, mask

    # -- linear maps ------------------------------------------------------------------------------

    def rescale(self, factor: Array) -> Self:
        """Covariance of `x * factor`, factor (T, D), or (1, D) if the same for all tokens."""
        return self.projected(factor[:, :, None, None] * self.to_dense() * factor[None, None])

    def map_features(self, kernel: Array) -> Self:
        """Covariance of `x @ kernel`, kernel (D, O)."""
        return self.projected(jnp.einsum("io,tisj,jp->tosp", kernel, self.to_dense(), kernel))

    def map_each(self, kernels: Array) -> Self:
        """Covariance of x_t @ kernels_t, each token with a kernel of its own, (T, D, O)."""
        dense = jnp.einsum("tio,tisj,sjp->tosp", kernels, self.to_dense(), kernels)
        return self.projected(dense)

    def map_tokens(self, weights: Array) -> Self:
        """Covariance of `weights @ x`, weights (U, T)."""
        return self.project(jnp.einsum("ut,tisj,vs->uivj", weights, self.to_dense(), weights))

    def entries(self, places: np.ndarray) -> Self:
        """Covariance of the (U, O) array of these entries of the flat x; -1 stands for zeros."""
        half = Cross(self.to_dense()).entries(places)
        return self.project(half.T.entries(places).cov)

    def add(self, other: Self) -> Self:
        """Covariance of the sum of two independent arrays."""
        return self.projected(self.to_dense() + other.to_dense())

    # -- random parameters and nonlinearities -------------------------------------------------------

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        """The contribution of an independent random kernel W to Cov[x @ W].

        That is sum_ij (Cov[x_ti, x_sj] + mean_ti mean_sj) Cov[W_io, W_jp] (derivation, Prop. 2).
        """
        noise = weights.noise_block(jnp.swapaxes(self._moment(mean), 1, 2))
        return self.projected(jnp.swapaxes(noise, 1, 2))

    def token_noise(self, mean: Array, weights: RandomKernel) -> Self:
        """`weight_noise` of the transposed array: that of a random kernel W (T, U) to Cov[W^T x]."""
        noise = weights.noise_block(jnp.transpose(self._moment(mean), (1, 3, 0, 2)))
        return self.project(jnp.transpose(noise, (2, 0, 3, 1)))

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        """The contribution to Cov[g * x] of a random gain g that all tokens share.

        That is (Cov[x_ti, x_sj] + mean_ti mean_sj) Cov[g_i, g_j]; gain_cov is (D, D) or (D,).
        """
        return self.projected(self._moment(mean) * vector_cov(gain_cov)[None, :, None, :])

    def _moment(self, mean: Array) -> Array:
        """E[x_td x_se] of an x with this mean."""
        return self.to_dense() + mean[:, :, None, None] * mean[None, None]

    def bias_noise(self, bias_cov: Array) -> Self:
        """Covariance of one random vector, a bias, at every token; bias_cov is (D, D) or (D,)."""
        t, cov = self.shape[0], vector_cov(bias_cov)
        return self.projected(jnp.broadcast_to(cov[None, :, None, :], 2 * (t, len(cov))))

    def elementwise(self, moments: Any) -> Self:
        """Covariance of f(x), f elementwise, for Gaussian x, from its `ElementwiseMoments`, (T, D) each.

        Between different entries, the first two terms of the Hermite (Mehler) expansion Cov[f(x), f(y)]
        = gain gain' c + second second' corr^2 + ...; on the diagonal, the exact variance.
        """
        dense, variance = self.to_dense(), self.variance()
        root = safe_sqrt(variance)
        # Square the quotient: a quotient of squares overflows earlier.
        squared_corr = safe_divide(dense, root[:, :, None, None] * root[None, None]) ** 2
        gain, second = moments.gain, moments.second
        kept = gain[:, :, None, None] * dense * gain[None, None]
        kept = kept + second[:, :, None, None] * squared_corr * second[None, None]
        # The rest of the variance (higher Hermite terms), nonnegative by Parseval.
        rest = nonnegative(moments.variance - gain**2 * variance - second**2)
        return self.projected(kept + diagonal_matrix(rest.ravel()).reshape(dense.shape))

    # -- dependent sums -----------------------------------------------------------------------------

    def with_itself(self) -> Any:
        """Cov[x, x], in the form in which this structure's layers carry Cov[x, f(x)]: see `Cross`."""
        return Cross(self.to_dense())

    def add_branch(self, branch: Self, cross: Any) -> Self:
        """Covariance of x + z, given that of z and Cov[x, z], or None if they are independent."""
        if cross is None:
            return self.add(branch)
        return self.projected(self.to_dense() + branch.to_dense() + cross.cov + cross.T.cov)

    def hadamard(self, other: Self, cross: Any) -> Self:
        """Covariance of x * z for jointly Gaussian x and z of mean zero, given Cov[x, z] or None."""
        dense = self.to_dense() * other.to_dense()
        if cross is not None:
            dense = dense + cross.cov * cross.T.cov
        return self.projected(dense)


class Moments(NamedTuple):
    """Mean and covariance of an array of any shape, such as the outputs (B, ..., C) of a batch.

    A pair that unpacks, `mean, cov = model(x)`, and a pytree. `cov` is a structure: that of each
    example's output as a sequence (T, C), with the batch axes leading in its fields. The properties have
    the mean's shape.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> moments = mj.Moments(jnp.zeros((5, 2)), mj.Diagonal(jnp.full((5, 1, 2), 4.0)))
    >>> moments.sd.shape, moments.features.shape
    ((5, 2), (5, 2, 2))
    """

    mean: Array
    cov: Any

    @property
    def variance(self) -> Array:
        """The variance of each entry, in the mean's shape."""
        return self.cov.variance().reshape(self.mean.shape)

    @property
    def sd(self) -> Array:
        """The standard deviation of each entry, in the mean's shape."""
        return safe_sqrt(self.variance)

    @property
    def features(self) -> Array:
        """The covariance of the last axis at each place, (..., C, C) for a mean (..., C)."""
        return self.cov.token_blocks().reshape(*self.mean.shape, -1)

    def __getattr__(self, name: str) -> Any:
        """For a wrong name; those of properties are above."""
        return no_such(self, name)

    def __repr__(self) -> str:
        """The shapes of the mean and of the covariance's fields."""
        return by_shapes(self)


def plus(left: Any, right: Any) -> Any:
    """The sum of two cross-covariances, of which None is zero."""
    if left is None or right is None:
        return right if left is None else left
    return left.add(right)
