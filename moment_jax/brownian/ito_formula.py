"""Ito's lemma as a transform of functions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.xla import diagonal_matrix

Coefficient = Callable[[Array, Array], Array]


def ito(
    function: Callable[[Array, Array], Any],
    *,
    drift: Coefficient | None = None,
    diffusion: Coefficient | None = None,
) -> Callable[[Array | float, Array | float], tuple[Any, Any]]:
    """Ito's lemma: for dX = a(t, X) dt + b(t, X) dB, the drift and the diffusion of f(t, X).

    df = (f_t + f_x a + 1/2 tr(b^T f_xx b)) dt + f_x b dB. Without coefficients X is Brownian motion
    itself (a = 0, b = 1, or the identity for a vector): df = (f_t + f_xx / 2) dt + f_x dB.

    The result works under jit, vmap and grad. It costs two nested jvp for each of the K motions and
    forms no Hessian.

    Args:
      function: f(t, x) -> an array or a pytree of arrays, twice differentiable by JAX; x of any shape.
      drift: a(t, x), of the shape of x; None for 0.
      diffusion: b(t, x): a scalar, for one motion (scalar x) or equal diffusion in every entry; of the
        shape of x, for an independent motion in each entry; or (*x.shape, K), for K motions. None for 1.

    Returns:
      (t, x) -> (drift, diffusion). The drift has the shape of f. So has the diffusion if x and b are
      scalars; otherwise it has one more last axis, over the K motions.

    Raises:
      ValueError: when called, if the shapes of the coefficients do not fit x.

    Source: The Brownian motion in the Transformer, Eq. 6 to 8.

    >>> import jax.numpy as jnp
    >>> drift, diffusion = ito(lambda t, x: x**2)(0.0, 3.0)
    >>> print(drift, diffusion)
    1.0 6.0
    """

    def transformed(t: Array | float, x: Array | float) -> tuple[Any, Any]:
        time, point = jnp.asarray(t, jnp.result_type(float)), jnp.asarray(x)
        if not jnp.issubdtype(point.dtype, jnp.inexact):
            point = point.astype(jnp.result_type(float))
        directions, single = _directions(diffusion, time, point)
        velocity = jnp.zeros_like(point) if drift is None else jnp.asarray(drift(time, point))
        if velocity.shape != point.shape:
            raise ValueError(
                f"`ito` needs a drift of the shape of x, {tuple(point.shape)}. Got "
                f"{tuple(velocity.shape)}."
            )
        _, ahead = jax.jvp(function, (time, point), (jnp.ones_like(time), velocity))

        def along(direction: Array) -> tuple[Any, Any]:
            """Df(x)[b] and D^2 f(x)[b, b]."""

            def slope(y: Array) -> Any:
                return jax.jvp(lambda x: function(time, x), (y,), (direction,))[1]

            return jax.jvp(slope, (point,), (direction,))

        slopes, curvatures = jax.vmap(along)(directions)
        whole = jax.tree.map(lambda a, c: a + 0.5 * jnp.sum(c, axis=0), ahead, curvatures)
        noise = jax.tree.map(lambda s: s[0] if single else jnp.moveaxis(s, 0, -1), slopes)
        return whole, noise

    return transformed


def _directions(diffusion: Coefficient | None, time: Array, point: Array) -> tuple[Array, bool]:
    """The direction of each motion, (K, *x.shape), and whether there is a single scalar motion."""
    spread = jnp.ones((), point.dtype) if diffusion is None else jnp.asarray(diffusion(time, point))
    if spread.ndim == point.ndim + 1 and spread.shape[:-1] == point.shape:
        return jnp.moveaxis(spread, -1, 0), False
    if spread.ndim == 0 or spread.shape == point.shape:
        entries = jnp.broadcast_to(spread, point.shape).ravel()
        return diagonal_matrix(entries).reshape(-1, *point.shape), point.ndim == 0
    raise ValueError(
        "`ito` needs a diffusion that is a scalar, of the shape of x, or of that shape and one more "
        f"last axis over the motions. Got {tuple(spread.shape)} for x of shape {tuple(point.shape)}."
    )
