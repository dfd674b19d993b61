"""LayerNorm as a map onto a sphere: exact statements, and the distance of tokens from it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


def to_sphere(x: Array, *, epsilon: float = 0.0) -> Array:
    """LayerNorm without gain and bias: onto the sphere of radius sqrt(D) where the features sum to 0.

    With epsilon > 0, as every implementation has it, the radius is sqrt(D v / (v + epsilon)) for a
    token whose features have the variance v: inside the sphere.

    Args:
      x: tokens, (..., D) with D at least 2.
      epsilon: added to the variance.

    Returns:
      (..., D); a token whose features are all the same goes to the origin, as it has no direction.

    Raises:
      ValueError: if D is below 2 or epsilon negative.

    Source: The Brownian motion in the Transformer, Eq. 11 and section 3.1.

    >>> import jax.numpy as jnp
    >>> print(to_sphere(jnp.array([[3.0, 5.0, 3.0, 5.0]])))
    [[-1.  1. -1.  1.]]
    """
    if x.ndim < 1 or x.shape[-1] < 2 or epsilon < 0:
        raise ValueError(
            "`to_sphere` needs tokens (..., D) with D >= 2 and epsilon >= 0. Got "
            f"{tuple(x.shape)} and {epsilon}."
        )
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    spread = jnp.mean(centred**2, axis=-1, keepdims=True) + epsilon
    positive = spread > 0
    return centred * jnp.where(positive, jax.lax.rsqrt(jnp.where(positive, spread, 1)), 0)


def squared_distances(x: Array, y: Array) -> Array:
    """|x_i - y_j|^2 for points (T, D) and (S, D): (T, S), never negative.

    From differences of the norms and the dot products, one matmul, about the mean of y so that little
    cancels.
    """
    centre = jnp.mean(y, axis=0, keepdims=True)
    x, y = x - centre, y - centre
    rows = jnp.sum(x**2, axis=1)[:, None] + jnp.sum(y**2, axis=1)[None, :]
    return jnp.maximum(rows - 2 * x @ y.T, 0)


def sphere_dot(x: Array, y: Array) -> Array:
    """The dot products of points on the sphere of radius sqrt(D), from distances: (2 D - d^2)/2.

    It equals x @ y.T exactly where all |x_i|^2 = |y_j|^2 = D, and else is off by
    (2 D - |x_i|^2 - |y_j|^2)/2.

    Args:
      x: (T, D).
      y: (S, D).

    Returns:
      (T, S).

    Source: The Brownian motion in the Transformer, Eq. 12.
    """
    return (2 * x.shape[1] - squared_distances(x, y)) / 2


class SphereGap(NamedTuple):
    """How far tokens are from the sphere of radius sqrt(D), averaged over them.

    Attributes:
      radius: |x| / sqrt(D), the mean over the tokens: 1 on the sphere.
      radius_spread: the sd of that over the tokens: 0 on any sphere about the origin.
      offset: |mean of the features| over the root mean square of the features: 0 on LayerNorm's sphere.
      dot_error: root mean square of Eq. 12's error over pairs of different tokens, relative to D (that
        of the token with itself where there is one token only).
    """

    radius: Array
    radius_spread: Array
    offset: Array
    dot_error: Array


def sphere_gap(tokens: Array) -> SphereGap:
    """How far tokens (..., T, D) are from LayerNorm's sphere; pairs are those of one sequence.

    >>> import jax
    >>> gap = sphere_gap(to_sphere(jax.random.normal(jax.random.key(0), (5, 8))))
    >>> bool(abs(gap.radius - 1) < 1e-6), bool(gap.dot_error < 1e-6)
    (True, True)
    """
    if tokens.ndim < 2 or tokens.shape[-1] < 2:
        raise ValueError(
            f"`sphere_gap` needs tokens (..., T, D) with D >= 2. Got {tuple(tokens.shape)}."
        )
    square = jnp.mean(tokens**2, axis=-1)
    radius = jnp.sqrt(square)
    offset = jnp.abs(jnp.mean(tokens, axis=-1)) / jnp.where(radius > 0, radius, 1)
    # 2 D - |x|^2 - |y|^2 over 2 D, without the distances themselves.
    error = 1 - (square[..., :, None] + square[..., None, :]) / 2
    count = tokens.shape[-2]
    pairs = ~jnp.eye(count, dtype=bool) if count > 1 else jnp.ones((1, 1), bool)
    weights = jnp.broadcast_to(pairs, error.shape)
    return SphereGap(
        jnp.mean(radius),
        jnp.std(radius),
        jnp.mean(offset),
        jnp.sqrt(jnp.sum(error**2 * weights) / jnp.sum(weights)),
    )
