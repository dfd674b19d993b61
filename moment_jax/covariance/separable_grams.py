"""How a `Separable` is made of variances and Gram matrices, and knows them for the next operation."""

from __future__ import annotations

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from moment_jax.covariance.base import Covariance, check_dense
from moment_jax.covariance.feature_gram import FeatureGram
from moment_jax.covariance.fields import FormedLater
from moment_jax.covariance.numerics import correlation_of, definite, safe_sqrt, vector_variance
from moment_jax.xla import (
    by_tokens,
    diagonal_matrix,
    materialized,
    materialized_inputs,
    rows_diagonal,
)

Array = jax.Array
NARROW = 12  # features, below which averages over them are checked: see `from_crossed`


class Grams(NamedTuple):
    """What a `Separable` was made of, for the next operation; boundaries of transformations drop it."""

    variance: Array  # (T, D)
    tokens: Array  # (T, T)
    features: FeatureGram


class MadeOfGrams(FormedLater, Covariance):
    """The constructors of `Separable`."""

    @staticmethod
    def share(statistic: Array) -> Array:
        """What stands for a statistic of the features: here every sequence's own."""
        return statistic

    @classmethod
    def own_variance(cls, variance: Array, token_gram: Array, pool: Array | None) -> Array:
        """Variances of this sequence's sum, (D,), from what stands for them."""
        return variance

    @classmethod
    def project(cls, dense: Array) -> Self:
        check_dense(dense)
        return cls.from_moments(
            jnp.einsum("tdtd->td", dense),
            jnp.einsum("tdsd->ts", dense),
            jnp.einsum("tdse->de", dense),
        )

    @classmethod
    @materialized_inputs
    def from_moments(
        cls,
        variance: Array,
        token_gram: Array,
        feature_gram: Array | FeatureGram,
        pool: Array | None = None,
    ) -> Self:
        """Made of variances (T, D), token Gram matrix (T, T) and covariance of the sum (D, D)."""
        variance = materialized(jnp.maximum(variance, 0))
        token_gram = materialized(by_tokens(token_gram))
        if not isinstance(feature_gram, FeatureGram):
            feature_gram = FeatureGram(feature_gram)
        feature_gram = feature_gram.shared(cls.share)
        total = jnp.maximum(feature_gram.diag(), 0)
        grams = Grams(variance, token_gram, feature_gram._replace(variance=total))
        later = {
            "scale": lambda: safe_sqrt(variance),
            "token_correlation": lambda: correlation_of(token_gram, rows_diagonal(token_gram)),
            "feature_correlation": lambda: correlation_of(grams.features.dense()),
        }
        sum_variance = cls.own_variance(total, token_gram, pool)
        return cls.formed(later, grams=grams, pool=pool, sum_variance=sum_variance)

    @classmethod
    def from_crossed(
        cls,
        variance: Array,
        token_gram: Array,
        feature_gram: Array | FeatureGram,
        pool: Array | None = None,
    ) -> Self:
        """`from_moments` of sums with cross terms that were averaged over tokens or features.

        Averages can leave Gram matrices indefinite where they are over few features: their
        off-diagonals are shrunk there. With more than `NARROW` features none was seen in 1,000 random
        attentions and blocks, and the eigenvalues are not computed.
        """
        if variance.shape[1] <= NARROW:
            if isinstance(feature_gram, FeatureGram):
                feature_gram = feature_gram.dense()
            token_gram, feature_gram = definite(token_gram), definite(feature_gram)
        return cls.from_moments(variance, token_gram, feature_gram, pool)

    @classmethod
    def shared(cls, num_tokens: int, cov: Array) -> Self:
        variance = vector_variance(cov)
        return cls.from_moments(
            jnp.broadcast_to(variance[None, :], (num_tokens, *variance.shape)),
            jnp.broadcast_to(jnp.sum(variance), (num_tokens, num_tokens)),
            FeatureGram(diagonal=num_tokens**2 * cov) if cov.ndim == 1 else num_tokens**2 * cov,
        )

    @classmethod
    def independent(cls, variance: Array) -> Self:
        return cls.from_moments(
            variance,
            diagonal_matrix(jnp.sum(variance, axis=1)),
            FeatureGram(diagonal=jnp.sum(variance, axis=0)),
        )
