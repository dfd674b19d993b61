"""`Full`: the complete covariance, T^2 D^2 numbers; the reference for all other structures."""

from __future__ import annotations

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
from moment_jax.covariance.numerics import nonnegative, safe_divide, safe_sqrt, vector_cov
from moment_jax.xla import diagonal_matrix


@register_fields
@dataclasses.dataclass(frozen=True)
class Full(Covariance):
    """The dense covariance of all entries: Cov[x_td, x_se] = C_tdse.

    Assumes nothing. C reshaped to (T D, T D) is the covariance of the flattened array.

    Args:
      cov: C, (T, D, T, D).
    """

    cov: Array

    num_axes: ClassVar[int] = 4
    feature_axes: ClassVar[Mapping[str, int]] = {"cov": 1}

    def __post_init__(self) -> None:
        call, fix = (
            "Full(cov)",
            "For variances, use Diagonal; for a matrix, cov.reshape(T, D, T, D).",
        )
        check_fields(call, fix, _other_shapes, self.cov)
        check_variances(call, self.cov, "td")

    @classmethod
    def zeros(cls, shape: tuple[int, int], dtype: jnp.dtype | type = jnp.float32) -> Self:
        return cls(jnp.zeros(2 * sequence_shape(cls, shape), dtype))

    @classmethod
    def project(cls, dense: Array) -> Self:
        check_dense(dense)
        return cls(dense)

    @classmethod
    def shared(cls, num_tokens: int, cov: Array) -> Self:
        block = vector_cov(cov)
        d = block.shape[0]
        return cls(jnp.broadcast_to(block[None, :, None, :], (num_tokens, d, num_tokens, d)))

    @classmethod
    def independent(cls, variance: Array) -> Self:
        return cls(diagonal_matrix(variance.ravel()).reshape(*variance.shape, *variance.shape))

    @property
    def shape(self) -> tuple[int, int]:
        t, d = self.cov.shape[:2]
        return t, d

    @property
    def dtype(self) -> jnp.dtype:
        return self.cov.dtype

    def variance(self) -> Array:
        return jnp.einsum("tdtd->td", self.cov)

    def to_dense(self) -> Array:
        return self.cov

    def full(self) -> Full:
        return self

    def token_blocks(self) -> Array:
        return jnp.einsum("tdte->tde", self.cov)

    def token_gram(self, metric: Array | None = None) -> Array:
        if metric is None:
            return jnp.einsum("tdsd->ts", self.cov)
        if metric.ndim == 1:
            return jnp.einsum("tdsd,d->ts", self.cov, metric)
        return jnp.einsum("tisj,ij->ts", self.cov, metric)

    def rescale(self, factor: Array) -> Self:
        return type(self)(factor[:, :, None, None] * self.cov * factor[None, None])

    def map_features(self, kernel: Array) -> Self:
        return type(self)(jnp.einsum("io,tisj,jp->tosp", kernel, self.cov, kernel))

    def map_tokens(self, weights: Array) -> Self:
        return type(self)(jnp.einsum("ut,tisj,vs->uivj", weights, self.cov, weights))

    def map_low_rank(self, gain: Array, left: Array, right: Array) -> Self:
        half = gain[:, :, None, None] * self.cov + jnp.einsum(
            "tik,tjk,tjsd->tisd", left, right, self.cov
        )
        return type(self)(
            half * gain[None, None] + jnp.einsum("tisd,sdk,sjk->tisj", half, right, left)
        )

    def add(self, *others: Self) -> Self:
        return type(self)(sum((other.cov for other in others), self.cov))

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        moment = self.cov + mean[:, :, None, None] * mean[None, None]
        noise = weights.noise_block(jnp.swapaxes(moment, 1, 2))
        return type(self)(jnp.swapaxes(noise, 1, 2))

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        moment = self.cov + mean[:, :, None, None] * mean[None, None]
        return type(self)(moment * vector_cov(gain_cov)[None, :, None, :])

    def elementwise(self, moments: ElementwiseGain) -> Self:
        t, d = self.shape
        variance = self.variance()
        root = safe_sqrt(variance)
        # Square the quotient: a quotient of squares overflows earlier.
        squared_corr = safe_divide(self.cov, root[:, :, None, None] * root[None, None]) ** 2
        gain, second = moments.gain, moments.second
        kept = (
            gain[:, :, None, None] * self.cov * gain[None, None]
            + second[:, :, None, None] * squared_corr * second[None, None]
        )
        # The rest of the exact variance (higher Hermite terms), nonnegative by Parseval.
        rest = nonnegative(moments.variance - gain**2 * variance - second**2)
        return type(self)(kept + diagonal_matrix(rest.ravel()).reshape(t, d, t, d))


def _other_shapes(cov: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(cov) < 4 or cov[-4:-2] != cov[-2:]:
        raise ValueError("needs a covariance of shape (T, D, T, D).")
    return []
