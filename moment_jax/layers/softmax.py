"""Softmax over the features of every token of a random sequence (Prop. 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from moment_jax.covariance import Covariance
from moment_jax.layers.checks import check_moments, check_order

Array = jax.Array
S = TypeVar("S", bound=Covariance)


def softmax(mean: Array, cov: S, *, order: int = 2, mask: Array | None = None) -> tuple[Array, S]:
    """Moments of the softmax over the last axis, row by row.

    Covariances, also those between different rows, pass the Jacobians J_t = diag(w_t) - w_t w_t^T. With
    order 1, w is the softmax of the mean. With order 2 it is `tilted_mean`: it agrees with Ito's
    second-order correction where noise is small and is a distribution at any noise.

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
    weights = masked_softmax(mean, mask)
    if order == 2:
        weights = tilted_mean(mean, cov.variance(), cov.token_matvec, mask, weights)
    left = -weights[:, :, None]
    return weights, cov.map_low_rank(weights, left, weights[:, :, None])


def masked_softmax(scores: Array, mask: Array | None) -> Array:
    """Softmax over the last axis; exactly zero where masked, and all zero where no key is left."""
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    lowest = jnp.finfo(scores.dtype).min
    shifted = jnp.where(mask, scores, lowest)
    shifted = shifted - jax.lax.stop_gradient(jnp.max(shifted, axis=-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, shifted, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def tilted_mean(
    mean: Array,
    variance: Array,
    matvec: Callable[[Array], Array],
    mask: Array | None,
    start: Array,
    num_iterations: int = 6,
) -> Array:
    """E[softmax(s)] for Gaussian rows, by the fixed point a = softmax(m + diag(R)/2 - R a).

    It is the optimum of the tilted bound on E[logsumexp] (Knowles and Minka, 2011). To first order in R
    it equals w + w/2 (diag R - 2 R w - <w, diag R> + 2 w^T R w), Ito's correction.

    Args:
      mean: m, (..., C).
      variance: diag(R), (..., C).
      matvec: a -> R a, row by row, (..., C) -> (..., C).
      mask: (..., C) boolean or None.
      start: the first iterate, softmax(m).
      num_iterations: unrolled damped steps.
    """
    tilted = mean + variance / 2
    weights = start
    for _ in range(num_iterations):
        pulled = matvec(weights)
        weights = 0.5 * weights + 0.5 * masked_softmax(tilted - pulled, mask)
    return weights
