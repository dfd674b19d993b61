"""LayerNorm as a map onto a sphere, and how far tokens are from that sphere."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


def to_sphere(x: Array, *, epsilon: float = 0.0) -> Array:
    """LayerNorm without gain and bias: maps to the sphere of radius sqrt(D) with features summing to 0.

    With epsilon > 0, as in every implementation, a token whose features have variance v is mapped inside
    the sphere, to radius sqrt(D v / (v + epsilon)).

    Args:
      x: tokens, (..., D) with D at least 2.
      epsilon: added to the variance.

    Returns:
      (..., D); a token with equal features has no direction and is mapped to the origin.

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

    Computed from norms and dot products, relative to the mean of y to reduce cancellation.
    """
    centre = jnp.mean(y, axis=0, keepdims=True)
    x, y = x - centre, y - centre
    rows = jnp.sum(x**2, axis=1)[:, None] + jnp.sum(y**2, axis=1)[None, :]
    return jnp.maximum(rows - 2 * x @ y.T, 0)


def sphere_dot(x: Array, y: Array) -> Array:
    """Dot products of points on the sphere of radius sqrt(D), from their distances: (2 D - d^2)/2.

    Equal to x @ y.T if all |x_i|^2 = |y_j|^2 = D; otherwise off by (2 D - |x_i|^2 - |y_j|^2)/2.

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
      radius: mean of |x| / sqrt(D) over the tokens: 1 on the sphere.
      radius_spread: its sd over the tokens: 0 on any sphere about the origin.
      offset: |mean of the features| over the root mean square of the features: 0 on LayerNorm's sphere.
      dot_error: root mean square of Eq. 12's error over pairs of different tokens, relative to D (for a
        single token, of the token with itself).
    """

    radius: Array
    radius_spread: Array
    offset: Array
    dot_error: Array


def sphere_gap(tokens: Array) -> SphereGap:
    """How far tokens (..., T, D) are from LayerNorm's sphere; pairs are within a sequence.

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
    # (2 D - |x|^2 - |y|^2) / 2 D
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
