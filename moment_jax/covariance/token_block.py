"""`TokenBlock`: each token's feature covariance, tokens independent; T D^2 numbers."""

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
from moment_jax.xla import by_tokens, diagonal_matrix


@register_fields
@dataclasses.dataclass(frozen=True)
class TokenBlock(Covariance):
    """One (D, D) covariance per token: Cov[x_td, x_se] = [t = s] B_tde.

    Assumes independent tokens. Right for networks that see one token or row at a time (an MLP); off by
    up to five times in the standard deviation where tokens share random weights.

    Args:
      blocks: B, (T, D, D), symmetric positive semidefinite.
    """

    blocks: Array

    num_axes: ClassVar[int] = 3
    independent_tokens: ClassVar[bool] = True
    feature_axes: ClassVar[Mapping[str, int]] = {"blocks": 1}
    token_fields: ClassVar[frozenset[str]] = frozenset({"blocks"})

    def __post_init__(self) -> None:
        call = "TokenBlock(blocks)"
        check_fields(call, "For variances (T, D), use Diagonal.", _other_shapes, self.blocks)
        check_variances(call, self.blocks, "d")

    @classmethod
    def zeros(cls, shape: tuple[int, int], dtype: jnp.dtype | type = jnp.float32) -> Self:
        t, d = sequence_shape(cls, shape)
        return cls(by_tokens(jnp.zeros((t, d, d), dtype)))

    @classmethod
    def project(cls, dense: Array) -> Self:
        check_dense(dense)
        return cls(jnp.einsum("tdte->tde", dense))

    @classmethod
    def shared(cls, num_tokens: int, cov: Array) -> Self:
        block = vector_cov(cov)
        return cls(jnp.broadcast_to(block[None], (num_tokens, *block.shape)))

    @classmethod
    def independent(cls, variance: Array) -> Self:
        return cls(diagonal_matrix(variance))

    def variance(self) -> Array:
        return jnp.einsum("tdd->td", self.blocks)

    def to_dense(self) -> Array:
        tokens = jnp.eye(self.shape[0], dtype=self.dtype)
        return jnp.einsum("tde,ts->tdse", self.blocks, tokens)

    def token_blocks(self) -> Array:
        return self.blocks

    def token_gram(self, metric: Array | None = None) -> Array:
        if metric is None:
            return diagonal_matrix(jnp.einsum("tdd->t", self.blocks))
        if metric.ndim == 1:
            return diagonal_matrix(self.variance() @ metric)
        return diagonal_matrix(jnp.einsum("tij,ij->t", self.blocks, metric))

    def rescale(self, factor: Array) -> Self:
        return type(self)(factor[:, :, None] * self.blocks * factor[:, None, :])

    def map_features(self, kernel: Array) -> Self:
        return type(self)(jnp.einsum("io,tij,jp->top", kernel, self.blocks, kernel))

    def map_tokens(self, weights: Array) -> Self:
        return type(self)(jnp.einsum("ut,tij->uij", weights**2, self.blocks))

    def map_low_rank(self, gain: Array, left: Array, right: Array) -> Self:
        half = gain[:, :, None] * self.blocks + jnp.einsum(
            "tik,tjk,tjd->tid", left, right, self.blocks
        )
        return type(self)(
            half * gain[:, None, :] + jnp.einsum("tid,tdk,tjk->tij", half, right, left)
        )

    def add(self, *others: Self) -> Self:
        return type(self)(sum((other.blocks for other in others), self.blocks))

    def weight_noise(self, mean: Array, weights: RandomKernel) -> Self:
        return type(self)(weights.noise_block(self.blocks + mean[:, :, None] * mean[:, None, :]))

    def gain_noise(self, mean: Array, gain_cov: Array) -> Self:
        moment = self.blocks + mean[:, :, None] * mean[:, None, :]
        return type(self)(moment * vector_cov(gain_cov)[None])

    def elementwise(self, moments: ElementwiseGain) -> Self:
        variance = self.variance()
        root = safe_sqrt(variance)
        # Square the quotient: a quotient of squares overflows earlier.
        squared_corr = safe_divide(self.blocks, root[:, :, None] * root[:, None, :]) ** 2
        gain, second = moments.gain, moments.second
        kept = (
            gain[:, :, None] * self.blocks * gain[:, None, :]
            + second[:, :, None] * squared_corr * second[:, None, :]
        )
        # The rest of the exact variance (higher Hermite terms), nonnegative by Parseval.
        rest = nonnegative(moments.variance - gain**2 * variance - second**2)
        return type(self)(kept + diagonal_matrix(rest))


def _other_shapes(blocks: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(blocks) < 3 or blocks[-1] != blocks[-2]:
        raise ValueError("needs blocks of shape (T, D, D).")
    return []
