"""Ito's drift: half the second derivative of a function along the directions of its noise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def directional_derivatives(
    function: Callable[[Array], Any], x: Array, direction: Array
) -> tuple[Any, Any, Any]:
    """f(x), Df(x)[b] and D^2 f(x)[b, b] for one direction b, by nested jvp; f may return any pytree."""

    def first(point: Array) -> tuple[Any, Any]:
        return jax.jvp(function, (point,), (direction,))

    (value, slope), (_, curvature) = jax.jvp(first, (x,), (direction,))
    return value, slope, curvature


def second_order_term(function: Callable[[Array], Any], mean: Array, factor: Array) -> Any:
    """1/2 sum_k D^2 f(mean)[b_k, b_k]: what noise of covariance sum_k b_k b_k^T adds to E[f].

    The second-order Taylor correction of a mean, and Ito's drift of a diffusion with coefficients b. No
    Hessian is formed; the cost is two nested jvp per direction.

    Args:
      function: any JAX function of one array.
      mean: the point, of any shape.
      factor: directions b, (K, *mean.shape).

    Returns:
      A pytree like function(mean).

    Raises:
      ValueError: if shapes do not fit.

    Source: The Brownian motion in the Transformer, Eq. 7 and 8.
    """
    if factor.shape[1:] != mean.shape:
        raise ValueError(
            f"`second_order_term` needs directions of shape (K, {', '.join(map(str, mean.shape))}). "
            f"Got {tuple(factor.shape)}. For one direction, use factor[None]."
        )
    curvature = jax.vmap(lambda b: directional_derivatives(function, mean, b)[2])(factor)
    return jax.tree.map(lambda c: 0.5 * jnp.sum(c, axis=0), curvature)
