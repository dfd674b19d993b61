"""Second moments after the per-token maps x_t -> gain_t * x_t + left_t (right_t^T x_t) of rank k."""

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance.numerics import gram


def low_rank_variance(variance: Array, gain: Array, left: Array, right: Array) -> Array:
    """Variances of the mapped x, (T, D), for independent features; left and right are (T, D, k)."""
    own = gain**2 + 2 * gain * jnp.sum(left * right, axis=-1)
    inner = jnp.einsum("tjk,tj,tjl->tkl", right, variance, right)
    # A sum of squares, up to rounding.
    return jnp.maximum(own * variance + jnp.einsum("tik,tkl,til->ti", left, inner, left), 0)


def low_rank_moments(
    scale: Array,
    correlation: Array,
    gain: Array,
    left: Array,
    right: Array,
    pairs: Array,
) -> tuple[Array, Array, Array]:
    """Variances and Gram matrices of the mapped x, for one feature correlation in all tokens.

    With B_t = diag(own_t) + sum_k left_tk reach_tk^T, own = gain scale and reach = right scale, the
    covariance of tokens t and s is B_t R B_s^T times their correlation. Takes the signed sd `scale` (T,
    D), R (D, D), gain (T, D), left and right (T, D, k), and weights `pairs` (T, T) of pairs of tokens.

    Returns:
      Variances (T, D); tr(B_t R B_s^T), (T, T); sum_ts pairs_ts B_t R B_s^T, (D, D).
    """
    own = gain * scale
    left, right = jnp.moveaxis(left, -1, 0), jnp.moveaxis(right, -1, 0)  # (k, T, D)
    reach = right * scale[None]
    pulled = reach @ correlation  # reach_tk^T R
    inner = jnp.einsum("ktd,ltd->tkl", reach, pulled)
    bent = jnp.einsum("tkl,ltd->ktd", inner, left)
    variance = own**2 + jnp.sum((2 * own[None] * pulled + bent) * left, axis=0)
    token_cross = jnp.sum(own[None] @ jnp.swapaxes(pulled * left, 1, 2), axis=0)
    lefts = jnp.einsum("ktd,lsd->klts", left, left)
    reaches = jnp.einsum("ktd,lsd->klts", reach, pulled)
    far = jnp.sum(reaches * lefts, axis=(0, 1))
    summed = pairs @ own
    feature_cross = jnp.einsum("ktd,kte->de", summed[None] * pulled, left)
    near = jnp.einsum("ktd,klts,lse->de", left, pairs[None, None] * reaches, left)
    return (
        jnp.maximum(variance, 0),  # a sum of squares, up to rounding
        gram(own) + token_cross + token_cross.T + far,
        correlation * (own.T @ summed) + feature_cross + feature_cross.T + near,
    )
