"""Brownian paths, the heat equation, Ito's lemma."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.brownian.kernels import check_positive
from moment_jax.covariance.fields import check_array, need
from moment_jax.xla import diagonal_matrix

Coefficient = Callable[[Array, Array], Array]


def brownian_increments(
    key: Array, steps: int, *, dt: float, shape: tuple[int, ...] = (),
    dtype: jnp.dtype | type = jnp.float32,
) -> Array:  # fmt: skip
    """Independent N(0, dt) increments, (steps, *shape); ValueError unless steps and dt are positive."""
    check_positive("brownian_increments", "steps", steps)
    check_positive("brownian_increments", "dt", dt)
    return dt**0.5 * jax.random.normal(key, (steps, *shape), dtype)


def brownian_path(increments: Array) -> Array:
    """The path B, starting at B_0 = 0: (steps + 1, ...) from increments (steps, ...)."""
    need("brownian_path", increments.ndim, "increments (steps, ...)", "a scalar")
    return jnp.concatenate([jnp.zeros_like(increments[:1]), jnp.cumsum(increments, axis=0)])


def quadratic_variation(path: Array) -> Array:
    """Running sum of squared steps, in the shape of the path; converges to t for Brownian motion.

    Source: The Brownian motion in the Transformer, dB^2 = dt above Eq. 7.
    """
    check_array("quadratic_variation", path)
    squares = jnp.diff(path, axis=0) ** 2
    return jnp.concatenate([jnp.zeros_like(path[:1]), jnp.cumsum(squares, axis=0)])


def heat_step(density: Array, *, diffusivity: float, dx: float, dt: float) -> Array:
    """One explicit step of dP/dt = diffusivity d^2P/dx^2 on a ring, over the last axis.

    P_i + r (P_(i-1) - 2 P_i + P_(i+1)) with r = diffusivity dt / dx^2. This is one step of a walk that
    goes to either side with probability r, so it keeps mass and nonnegativity. ValueError if r is above
    1/2, where the scheme is unstable, or a number is not positive.

    Source: The Brownian motion in the Transformer, Eq. 4 and 5.
    """
    for what, value in (("diffusivity", diffusivity), ("dx", dx), ("dt", dt)):
        check_positive("heat_step", what, value)
    rate = diffusivity * dt / dx**2
    rule = "diffusivity dt / dx^2 <= 1/2 to be stable"
    mend = f"Take at least {2 * rate:.3g} times as many steps."
    need("heat_step", rate <= 0.5 * (1 + 1e-12), rule, f"{rate:.4g}", mend)
    left, right = jnp.roll(density, 1, axis=-1), jnp.roll(density, -1, axis=-1)
    return density + rate * (left - 2 * density + right)


def ito(
    function: Callable[[Array, Array], Any], *, drift: Coefficient | None = None,
    diffusion: Coefficient | None = None,
) -> Callable[[Array | float, Array | float], tuple[Any, Any]]:  # fmt: skip
    """Ito's lemma: for dX = a(t, X) dt + b(t, X) dB, the drift and the diffusion of f(t, X).

    df = (f_t + f_x a + 1/2 tr(b^T f_xx b)) dt + f_x b dB. Without coefficients X is Brownian motion
    itself (a = 0, b = 1, or the identity for a vector): df = (f_t + f_xx / 2) dt + f_x dB. It costs two
    nested jvp for each of the K motions and forms no Hessian.

    Args:
      function: f(t, x) -> an array or a pytree of arrays, twice differentiable by JAX; x of any shape.
      drift: a(t, x), of the shape of x; None for 0.
      diffusion: b(t, x): a scalar, for one motion (scalar x) or equal diffusion in every entry; of the
        shape of x, for an independent motion in each entry; or (*x.shape, K), for K motions. None for 1.

    Returns:
      (t, x) -> (drift, diffusion), for jit, vmap and grad; ValueError if the shapes of the coefficients
      do not fit x. The drift has the shape of f. So has the diffusion if x and b are scalars; otherwise
      it has one more last axis, over the K motions.

    Source: The Brownian motion in the Transformer, Eq. 6 to 8.
    """

    def transformed(t: Array | float, x: Array | float) -> tuple[Any, Any]:
        time, point = jnp.asarray(t, jnp.result_type(float)), jnp.asarray(x)
        if not jnp.issubdtype(point.dtype, jnp.inexact):
            point = point.astype(jnp.result_type(float))
        directions, single = _directions(diffusion, time, point)
        velocity = jnp.zeros_like(point) if drift is None else jnp.asarray(drift(time, point))
        rule = f"a drift of the shape of x, {point.shape}"
        need("ito", velocity.shape == point.shape, rule, velocity.shape)
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
