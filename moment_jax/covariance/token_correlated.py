"""`TokenCorrelated`: a scale per entry and one token correlation; T D + T^2 numbers."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.base import Covariance, ElementwiseGain, RandomKernel, check_dense
from moment_jax.covariance.fields import (
    FormedLater,
    check_correlations,
    register_fields,
    sequence_shape,
)
from moment_jax.covariance.low_rank import low_rank_variance
from moment_jax.covariance.numerics import (
    correlation_of,
    gram,
    nonnegative,
    safe_sqrt,
    vector_variance,
)
from moment_jax.xla import (
    by_tokens,
    diagonal_matrix,
    materialized,
    rows_diagonal,
)


@register_fields
@dataclasses.dataclass(frozen=True)
class TokenCorrelated(FormedLater, Covariance):
    """Independent features with one token correlation: Cov[x_td, x_se] = [d = e] s_td s_sd r_ts.

    The projection keeps the variances, s_td = sqrt(Var[x_td]), and the correlation r_ts = g_ts /
    sqrt(g_tt g_ss) of the token Gram matrix g_ts = sum_d Cov[x_td, x_sd]. The result is always positive
    semidefinite, and has exactly that Gram matrix if the scale has rank one, s_td = a_t b_d. The scale
    is signed, so that factors of either sign (`rescale`) stay exact.

    Assumes that different features are uncorrelated, and that all features have the same token
    correlation; shared weight noise approximately gives such a covariance.

    Args:
      scale: s, (T, D), signed.
      correlation: r, (T, T), unit diagonal.
    """

    scale: Array
    correlation: Array

    feature_axes: ClassVar[Mapping[str, int]] = {"scale": 1}
    token_fields: ClassVar[frozenset[str]] = frozenset({"scale", "correlation"})

    def __post_init__(self) -> None:
        check_correlations("TokenCorrelated(scale, correlation)", self.scale, self.correlation)

    @classmethod
    def zeros(cls, shape: tuple[int, int], dtype: jnp.dtype | type = jnp.float32) -> Self:
        unit = by_tokens(jnp.eye(sequence_shape(cls, shape)[0], dtype=dtype))
        return cls(by_tokens(jnp.zeros(shape, dtype)), unit)

    @classmethod
    def project(cls, dense: Array) -> Self:
        check_dense(dense)
        return cls.from_moments(jnp.einsum("tdtd->td", dense), jnp.einsum("tdsd->ts", dense))

    @classmethod
    def from_moments(cls, variance: Array, token_gram: Array) -> Self:
        """The structure with these variances (T, D) and this token Gram matrix (T, T)."""
        variance = materialized(nonnegative(variance))
        token_gram = materialized(by_tokens(token_gram))
        later = {
            "scale": lambda: safe_sqrt(variance),
            "correlation": lambda: correlation_of(token_gram, rows_diagonal(token_gram)),
        }
        return cls.formed(later, own_variance=variance, gram=token_gram)

    @classmethod
    def shared(cls, num_tokens: int, cov: Array) -> Self:
        variance = vector_variance(cov)
        gram = jnp.broadcast_to(jnp.sum(variance), (num_tokens, num_tokens))
        return cls.from_moments(
            jnp.broadcast_to(variance[None, :], (num_tokens, *variance.shape)), gram
        )

    @classmethod
    def independent(cls, variance: Array) -> Self:
        return cls.from_moments(variance, diagonal_matrix(jnp.sum(variance, axis=1)))

    @property
    def shape(self) -> tuple[int, int]:
        known = self.known("own_variance")
        shape = (self.scale if known is None else known).shape
        return shape[0], shape[1]  # fields made by hand may have batch axes

    @property
    def dtype(self) -> jnp.dtype:
        return self.variance().dtype

    def variance(self) -> Array:
        known: Array | None = self.known("own_variance")
        return self.scale**2 if known is None else known

    def to_dense(self) -> Array:
        features = jnp.eye(self.shape[1], dtype=self.dtype)
        per_feature = jnp.einsum("td,sd,ts->tds", self.scale, self.scale, self.correlation)
        return jnp.einsum("tds,de->tdse", per_feature, features)

    def token_blocks(self) -> Array:
        return diagonal_matrix(self.variance())

    def token_gram(self, metric: Array | None = None) -> Array:
        if metric is None:
            known: Array | None = self.known("gram")
            return self.correlation * gram(self.scale) if known is None else known
        return self.correlation * gram(self.scale, vector_variance(metric))

    def rescale(self, factor: Array) -> Self:
        return type(self)(self.scale * factor, self.correlation)

    def map_features(self, kernel: Array) -> Self:
        squared = kernel**2
        return self.from_moments(self.variance() @ squared, self.token_gram(jnp.sum(squared, 1)))

    def map_tokens(self, weights: Array) -> Self:
        weighted = weights[:, :, None] * self.scale[None]
        partial = jnp.einsum("utd,ts->usd", weighted, self.correlation)
        variance = nonnegative(jnp.sum(partial * weighted, axis=1))
        return self.from_moments(variance, weights @ self.token_gram() @ weights.T)

    def map_low_rank(self, gain: Array, left: Array, right: Array) -> Self:
        variance = low_rank_variance(self.variance(), gain, left, right)
        both = jnp.sum(left * right, axis=-1)
        straight, bent = self.scale * (gain + both), self.scale * both
        right = right * self.scale[:, :, None]
        inner = jnp.einsum("tik,sil->tskl", left, left) * jnp.einsum("tjk,sjl->tskl", right, right)
        pattern = gram(straight) - gram(bent) + jnp.sum(inner, axis=(2, 3))
        return self.from_moments(variance, self.correlation * pattern)

    def add(self, *others: Self) -> Self:
        variance = sum((other.variance() for other in others), self.variance())
        grams = sum((other.token_gram() for other in others), self.token_gram())
        return self.from_moments(variance, grams)

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        metric = weights.input_metric()
        return self.from_moments(
            weights.noise_variance(mean, self.variance()),
            self.token_gram(metric) + gram(mean, metric),
        )

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        metric = vector_variance(gain_cov)
        return self.from_moments(
            (self.variance() + mean**2) * metric[None, :],
            self.token_gram(metric) + gram(mean, metric),
        )

    def elementwise(self, moments: ElementwiseGain) -> Self:
        first = self.scale * moments.gain
        rest = nonnegative(moments.variance - first**2 - moments.second**2)
        token_gram = (
            self.correlation * gram(first)
            + self.correlation**2 * gram(moments.second)
            + diagonal_matrix(jnp.sum(rest, axis=1))
        )
        return self.from_moments(moments.variance, token_gram)
