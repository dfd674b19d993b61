"""Softmax over the features of every token of a random sequence (Prop. 3)."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax

from moment_jax.covariance import Covariance
from moment_jax.expectations import expected_softmax, masked_softmax
from moment_jax.layers.checks import check_moments, check_order
from moment_jax.xla import materialized_inputs

Array = jax.Array
S = TypeVar("S", bound=Covariance)


@materialized_inputs
def softmax(mean: Array, cov: S, *, order: int = 2, mask: Array | None = None) -> tuple[Array, S]:
    """Moments of the softmax over the last axis, row by row.

    Covariances, also those between different rows, pass the Jacobians J_t = diag(w_t) - w_t w_t^T. With
    order 1, w is the softmax of the mean. With order 2 it is `expectations.expected_softmax`:
    Ito's second-order correction where noise is small, and a distribution at any noise.

    Assumes that x is Gaussian (order 2).

    Args:
      mean: E[x], (T, C).
      cov: covariance of x, a structure of shape (T, C).
      order: 1 or 2.
      mask: (T, C) boolean, True where a weight may be positive; None for everywhere. Masked weights
        are exactly zero, and so is a row that is masked everywhere.

    Returns:
      Mean (T, C), nonnegative rows that sum to one, and covariance in the structure of `cov`.

    Raises:
      ValueError: if shapes do not fit, or order is neither 1 nor 2.

    Source: Transformer derivation, Prop. 3 and Eq. 10, 11; Brownian motion in the Transformer, Eq. 7
    (the second-order term).
    """
    check_moments("softmax", mean, cov)
    check_order("softmax", order)
    if mask is not None and tuple(mask.shape) != tuple(mean.shape):
        raise ValueError(
            f"`softmax` needs a mask of the shape of the mean, {tuple(mean.shape)}, True where a "
            f"weight may be positive. Got {tuple(mask.shape)}."
        )
    if order == 1:
        weights = masked_softmax(mean, mask)
    else:
        weights = expected_softmax(mean, _TokenCovariance(cov), mask)
    left = -weights[:, :, None]
    return weights, cov.map_low_rank(weights, left, weights[:, :, None])


class _TokenCovariance(NamedTuple):
    """The covariance of each token's features, as a `ScoreCovariance`."""

    cov: Covariance

    def variance(self) -> Array:
        return self.cov.variance()

    def matvec(self, vectors: Array) -> Array:
        return self.cov.token_matvec(vectors)

    def square_matvec(self, vectors: Array) -> Array:
        return self.cov.token_square_matvec(vectors)
