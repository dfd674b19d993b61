"""`Full`: the complete covariance, T^2 D^2 numbers; the textbook that all structures are held to."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.base import Covariance, RandomKernel, check_dense
from moment_jax.covariance.fields import check_fields, check_variances, register_fields
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
    exact: ClassVar[bool] = True
    feature_axes: ClassVar[Mapping[str, int]] = {"cov": 1}

    def __post_init__(self) -> None:
        fix = "For variances, use Diagonal; for a matrix, cov.reshape(T, D, T, D)."
        check_fields("Full(cov)", fix, _other_shapes, self.cov)
        check_variances("Full(cov)", self.cov, "td")

    @classmethod
    def project(cls, dense: Array) -> Self:
        check_dense(dense)
        return cls.unchecked(dense)

    def full(self) -> "Full":
        return self

    def to_dense(self) -> Array:
        return self.cov

    def rescale(self, factor: Array) -> Self:
        return self.unchecked(factor[:, :, None, None] * self.cov * factor[None, None])

    def map_features(self, kernel: Array) -> Self:
        return self.unchecked(jnp.einsum("io,tisj,jp->tosp", kernel, self.cov, kernel))

    def map_tokens(self, weights: Array) -> Self:
        return self.unchecked(jnp.einsum("ut,tisj,vs->uivj", weights, self.cov, weights))

    def map_each(self, kernels: Array) -> Self:
        return self.unchecked(jnp.einsum("tio,tisj,sjp->tosp", kernels, self.cov, kernels))

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        moment = self.cov + mean[:, :, None, None] * mean[None, None]
        noise = weights.noise_block(jnp.swapaxes(moment, 1, 2))
        return self.unchecked(jnp.swapaxes(noise, 1, 2))

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        moment = self.cov + mean[:, :, None, None] * mean[None, None]
        return self.unchecked(moment * vector_cov(gain_cov)[None, :, None, :])

    def bias_noise(self, bias_cov: Array) -> Self:
        t, cov = self.shape[0], vector_cov(bias_cov)
        return self.unchecked(jnp.broadcast_to(cov[None, :, None, :], 2 * (t, len(cov))))

    def elementwise(self, moments: Any) -> Self:
        t, d = self.shape
        variance = self.variance()
        root = safe_sqrt(variance)
        # Square the quotient: a quotient of squares overflows earlier.
        squared_corr = safe_divide(self.cov, root[:, :, None, None] * root[None, None]) ** 2
        gain, second = moments.gain, moments.second
        kept = gain[:, :, None, None] * self.cov * gain[None, None]
        kept = kept + second[:, :, None, None] * squared_corr * second[None, None]
        # The rest of the variance (higher Hermite terms), nonnegative by Parseval.
        rest = nonnegative(moments.variance - gain**2 * variance - second**2)
        return self.unchecked(kept + diagonal_matrix(rest.ravel()).reshape(t, d, t, d))


def _other_shapes(cov: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(cov) < 4 or cov[-4:-2] != cov[-2:]:
        raise ValueError("needs a covariance of shape (T, D, T, D).")
    return []
