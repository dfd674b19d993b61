"""Brownian paths, stochastic differential equations (Euler-Maruyama), the heat equation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.brownian.checks import check_positive
from moment_jax.covariance.fields import check_array

Coefficient = Callable[[Array, Array], Array]


def brownian_increments(
    key: Array,
    steps: int,
    *,
    dt: float,
    shape: tuple[int, ...] = (),
    dtype: jnp.dtype | type = jnp.float32,
) -> Array:
    """Independent N(0, dt) increments, (steps, *shape).

    Raises:
      ValueError: if steps or dt is not positive.
    """
    check_positive("brownian_increments", "steps", steps)
    check_positive("brownian_increments", "dt", dt)
    return dt**0.5 * jax.random.normal(key, (steps, *shape), dtype)


def brownian_path(increments: Array) -> Array:
    """The path B, starting at B_0 = 0: (steps + 1, ...) from increments (steps, ...)."""
    if increments.ndim < 1:
        raise ValueError("`brownian_path` needs increments (steps, ...). Got a scalar.")
    return jnp.concatenate([jnp.zeros_like(increments[:1]), jnp.cumsum(increments, axis=0)])


def quadratic_variation(path: Array) -> Array:
    """Running sum of squared steps, in the shape of the path; converges to t for Brownian motion.

    Source: The Brownian motion in the Transformer, dB^2 = dt above Eq. 7.
    """
    check_array("quadratic_variation", path)
    squares = jnp.diff(path, axis=0) ** 2
    return jnp.concatenate([jnp.zeros_like(path[:1]), jnp.cumsum(squares, axis=0)])


def euler_maruyama(
    drift: Coefficient, diffusion: Coefficient, start: Array, increments: Array, *, dt: float
) -> Array:
    """Solve dX = a(t, X) dt + b(t, X) dB: strong order 1/2, weak order 1.

    Args:
      drift: a(t, x), of the shape of x.
      diffusion: b(t, x), a scalar or of the shape of x, multiplied entrywise; or (*x.shape, K) for K
        motions.
      start: X at time zero, of any shape; vmap over batches.
      increments: (steps, *x.shape), or (steps, K) for K motions, of variance dt.
      dt: length of a step.

    Returns:
      (steps + 1, *x.shape), beginning with the start.

    Raises:
      ValueError: if dt is not positive.
    """
    check_positive("euler_maruyama", "dt", dt)
    first = jnp.asarray(start, increments.dtype)
    times = dt * jnp.arange(increments.shape[0], dtype=increments.dtype)

    def step(x: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        t, noise = now
        spread = jnp.asarray(diffusion(t, x))
        push = spread @ noise if spread.ndim == x.ndim + 1 else spread * noise
        new = (x + drift(t, x) * dt + push).astype(x.dtype)
        return new, new

    return jnp.concatenate([first[None], jax.lax.scan(step, first, (times, increments))[1]])


def heat_step(density: Array, *, diffusivity: float, dx: float, dt: float) -> Array:
    """One explicit step of dP/dt = diffusivity d^2P/dx^2 on a ring, over the last axis.

    P_i + r (P_(i-1) - 2 P_i + P_(i+1)) with r = diffusivity dt / dx^2. This is one step of a walk that
    goes to either side with probability r, so it keeps mass and nonnegativity.

    Raises:
      ValueError: if r is above 1/2, where the scheme is unstable, or a number is not positive.

    Source: The Brownian motion in the Transformer, Eq. 4 and 5.
    """
    for what, value in (("diffusivity", diffusivity), ("dx", dx), ("dt", dt)):
        check_positive("heat_step", what, value)
    rate = diffusivity * dt / dx**2
    if rate > 0.5 * (1 + 1e-12):
        raise ValueError(
            "`heat_step` needs diffusivity dt / dx^2 <= 1/2 to be stable. "
            f"Got {rate:.4g}: take at least {2 * rate:.3g} times as many steps."
        )
    left, right = jnp.roll(density, 1, axis=-1), jnp.roll(density, -1, axis=-1)
    return density + rate * (left - 2 * density + right)
