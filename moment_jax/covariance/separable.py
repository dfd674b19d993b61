"""`Separable`: a scale per entry, a token correlation and a feature correlation."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import separable_noise
from moment_jax.covariance.base import ElementwiseGain, RandomKernel
from moment_jax.covariance.fields import check_correlations, register_fields, sequence_shape
from moment_jax.covariance.low_rank import low_rank_moments
from moment_jax.covariance.numerics import (
    gram,
    nonnegative,
    paired,
    safe_divide,
    safe_sqrt,
    weighted,
)
from moment_jax.covariance.separable_grams import FeatureGram, Grams, MadeOfGrams
from moment_jax.xla import diagonal_of

DEFAULTS = ("pool", "sum_variance")  # fields that may be None


@register_fields
@dataclasses.dataclass(frozen=True)
class Separable(MadeOfGrams):
    """Token and feature correlations multiply: Cov[x_td, x_se] = s_td s_se r_ts R_de.

    The projection keeps the variances, s_td = sqrt(Var[x_td]), the correlation r of the token Gram
    matrix sum_d Cov[x_td, x_sd], and the correlation R and the variances of the sum over the tokens,
    sum_t x_t. The result is always positive semidefinite, and exact if the covariance has this form
    with a scale of rank one, s_td = a_t b_d. The scale is signed.

    R comes from the sum because an average over tokens sees what they have in common, which the
    within-token covariance sum_t Cov[x_td, x_te] misses. On trained posteriors single tokens lose
    little by it; with independent tokens the pattern of the sd over features suffers. Linear maps of
    the features, and sums and averages over tokens, carry the covariance of the sum exactly, for any
    covariance.

    `map_features`, and `weight_noise` with correlated inputs, are exact for a scale of rank one.
    Otherwise the covariance of the sum is exact, and the variances get the pattern that uncorrelated
    features would give. (Exact variances would cost T D^2 O operations instead of D^2 O; the scales of
    trained posteriors are within about a tenth of rank one.) In a wide layer, elementwise functions
    apply one gain per feature to the covariance of the sum.

    Attention takes T^3 operations: for up to some 512 tokens. Use `Diagonal` beyond.

    Assumes that all pairs of features have the same token correlation.

    Args:
      scale: s, (T, D), signed.
      token_correlation: r, (T, T), unit diagonal.
      feature_correlation: R, (D, D), unit diagonal.
      pool: weights p (T,) of the tokens in the sum, sum_t p_t x_t; None for ones. See `pooled`.
      sum_variance: variances of that sum, (D,); None for those implied by scale and correlations.
    """

    scale: Array
    token_correlation: Array
    feature_correlation: Array
    pool: Array | None = None
    sum_variance: Array | None = None

    feature_axes: ClassVar[Mapping[str, int]] = {
        "scale": 1,
        "feature_correlation": 0,
        "sum_variance": 0,
    }

    def __post_init__(self) -> None:
        call = "Separable(scale, token_correlation, feature_correlation)"
        check_correlations(call, *(getattr(self, f.name) for f in dataclasses.fields(self)))

    def pooled(self, pool: Array | None) -> Self:
        """The same covariance, with a feature correlation taken from now on from some tokens only.

        All averages over tokens use these weights. Tokens of weight zero (padding, or later ones) then
        have no influence on the others.

        Args:
          pool: (T,), boolean or nonnegative; None to weigh all tokens equally.

        Raises:
          ValueError: if there is not one weight for each token.
        """
        if pool is not None:
            if pool.shape != self.scale.shape[:1]:
                raise ValueError(
                    f"`Separable.pooled` needs one weight for each of {self.scale.shape[0]} tokens. "
                    f"Got an array of shape {tuple(pool.shape)}. For equal weights, pass None."
                )
            pool = pool.astype(self.dtype)
        weights = jnp.ones_like(self.scale[:, 0]) if pool is None else pool
        ratio = safe_divide(self.pooled_variance(weights), self.pooled_variance())
        known: Grams | None = self.known("grams")
        if known is not None:
            gain = safe_sqrt(ratio)
            known = known._replace(features=known.features.rescaled(gain))
        variance = None if self.sum_variance is None else self.sum_variance * ratio
        return self.with_grams(known, pool=pool, sum_variance=variance)

    def with_own_grams(self) -> Self:
        """The same covariance, with its Gram matrices computed once for all later uses."""
        if self.known("grams") is not None:
            return self
        return self.with_grams(Grams(self.variance(), self.token_gram(), self.features()))

    def with_grams(
        self,
        grams: Grams | None,
        changed: Mapping[str, Callable[[], Array]] | None = None,
        **fields: Any,
    ) -> Self:
        """The same with some fields replaced, and the matching Gram matrices where known.

        `changed` are fields to form when they are read.
        """
        if grams is None:
            return dataclasses.replace(self, **fields)
        names = {field.name for field in dataclasses.fields(self)} - {*fields}
        later = {name: functools.partial(getattr, self, name) for name in names - {*DEFAULTS}}
        kept = {name: getattr(self, name) for name in names & {*DEFAULTS}}
        return self.formed(later | dict(changed or {}), grams=grams, **kept, **fields)

    def pooled_variance(self, weights: Array | None = None) -> Array:
        """Variances of the sum over tokens, (D,), implied by scale and token correlation.

        `weights` (T,) replace `pool`.
        """
        rows = weighted(self.scale, self.pool if weights is None else weights)
        return nonnegative(paired(rows, rows, self.token_correlation))

    @classmethod
    def zeros(cls, shape: tuple[int, int], dtype: jnp.dtype | type = jnp.float32) -> Self:
        t, d = sequence_shape(cls, shape)
        unit, none = jnp.eye(t, dtype=dtype), jnp.zeros(d, dtype)
        return cls(jnp.zeros(shape, dtype), unit, jnp.eye(d, dtype=dtype), sum_variance=none)

    @property
    def shape(self) -> tuple[int, int]:
        known: Grams | None = self.known("grams")
        shape = (self.scale if known is None else known.variance).shape
        return shape[0], shape[1]  # fields made by hand may have batch axes

    @property
    def dtype(self) -> jnp.dtype:
        return self.variance().dtype

    def variance(self) -> Array:
        known: Grams | None = self.known("grams")
        return self.scale**2 if known is None else known.variance

    def to_dense(self) -> Array:
        return jnp.einsum(
            "td,se,ts,de->tdse",
            self.scale,
            self.scale,
            self.token_correlation,
            self.feature_correlation,
        )

    def token_blocks(self) -> Array:
        return self.scale[:, :, None] * self.feature_correlation[None] * self.scale[:, None, :]

    def token_gram(self, metric: Array | None = None) -> Array:
        if metric is None:
            known: Grams | None = self.known("grams")
            if known is None:
                return self.token_correlation * gram(self.scale)
            return known.tokens
        if metric.ndim == 1:
            return self.fitted_token_gram(self.variance() @ metric)
        return self.token_correlation * gram(self.scale, self.feature_correlation * metric)

    def fitted_token_gram(self, energy: Array) -> Array:
        """The token Gram matrix with another diagonal, (T,), and the same correlation, (T, T)."""
        token_gram = self.token_gram()
        root = safe_sqrt(safe_divide(energy, diagonal_of(token_gram)))
        return root[:, None] * token_gram * root[None, :]

    def feature_gram(self) -> Array:
        """Cov[sum_t p_t x_t], (D, D)."""
        return self.features().dense()

    def features(self) -> FeatureGram:
        """The feature Gram matrix in factored form."""
        known: Grams | None = self.known("grams")
        if known is not None:
            return known.features
        rows = weighted(self.scale, self.pool)
        if self.sum_variance is None:
            inner = gram(rows.T, self.token_correlation)
            return FeatureGram(self.feature_correlation * inner)
        sign = jnp.where(jnp.sum(rows, axis=0) < 0, -1, 1).astype(self.dtype)
        root = sign * safe_sqrt(self.sum_variance)
        whole = root[:, None] * self.feature_correlation * root[None, :]
        return FeatureGram(whole, variance=self.sum_variance)

    def summed_variance(self) -> Array:
        """Variances of the sum over tokens, (D,)."""
        return self.pooled_variance() if self.sum_variance is None else self.sum_variance

    def rescale(self, factor: Array) -> Self:
        """X * factor: exact, except the covariance of the sum if the factor differs between tokens."""
        if factor.shape[0] > 1:
            return dataclasses.replace(self, scale=self.scale * factor, sum_variance=None)
        gain, squared = factor[0], factor[0] ** 2
        variance = self.variance() * squared[None, :]
        token_gram = self.fitted_token_gram(jnp.sum(variance, axis=1))
        return self.with_grams(
            Grams(variance, token_gram, self.features().rescaled(gain)),
            {"scale": lambda: self.scale * factor},
            sum_variance=self.summed_variance() * squared,
        )

    def map_features(self, kernel: Array) -> Self:
        """X @ kernel: the covariance of the sum is exact, and everything is for a scale of rank one."""
        before, variance, squared = self.features(), self.variance(), kernel**2
        features = before.map(kernel)
        factor = safe_divide(nonnegative(features.diag()), before.diag() @ squared)
        # A scale of rank one leaves the token correlation unchanged. The new diagonal is computed
        # without the variances, which queries and keys do not need.
        return self.from_moments(
            (variance @ squared) * factor[None, :],
            self.fitted_token_gram(variance @ (squared @ factor)),
            features,
            self.pool,
        )

    def map_tokens(self, weights: Array) -> Self:
        """Weights @ x: variances and token Gram matrix are exact."""
        scaled = weights[:, :, None] * self.scale[None]
        partial = jnp.einsum("utd,ts->usd", scaled, self.token_correlation)
        variance = nonnegative(jnp.sum(partial * scaled, axis=1))
        token_gram = weights @ self.token_gram() @ weights.T
        features = self.features()
        if weights.shape[0] == 1:
            known = self.summed_variance()
            variance = separable_noise.sum_variance(self, weights[0], known)[None, :]
            ratio = safe_divide(variance[0], known)
        else:
            total = jnp.sum(weights, axis=0)
            ratio = safe_divide(self.pooled_variance(total), self.pooled_variance())
        features = features.rescaled(safe_sqrt(ratio))
        return self.from_moments(variance, token_gram, features)

    def map_low_rank(self, gain: Array, left: Array, right: Array) -> Self:
        pairs = self.token_correlation
        if self.pool is not None:
            pairs = self.pool[:, None] * pairs * self.pool[None, :]
        variance, pattern, feature_gram = low_rank_moments(
            self.scale, self.feature_correlation, gain, left, right, pairs
        )
        token_gram = self.token_correlation * pattern
        return self.from_moments(variance, token_gram, feature_gram, self.pool)

    def add(self, *others: Self) -> Self:
        every: tuple[Self, ...] = (self, *others)
        pool = next((cov.pool for cov in every if cov.pool is not None), None)
        every = tuple(cov if cov.pool is pool else cov.pooled(pool) for cov in every)
        return self.from_moments(
            sum((cov.variance() for cov in others), self.variance()),
            sum((cov.token_gram() for cov in others), self.token_gram()),
            functools.reduce(FeatureGram.plus, (cov.features() for cov in every)),
            pool,
        )

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        return self.from_moments(*separable_noise.kernel(self, mean, weights), pool=self.pool)

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        return self.from_moments(*separable_noise.gain(self, mean, gain_cov), pool=self.pool)

    def elementwise(self, moments: ElementwiseGain) -> Self:
        grams = separable_noise.elementwise(self, moments)
        return self.from_moments(moments.variance, *grams, pool=self.pool)
