"""Brownian paths, stochastic differential equations (Euler-Maruyama, Milstein), the heat equation."""

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


def brownian_bridge(path: Array, end: Array | float = 0.0) -> Array:
    """Tie the path (steps + 1, ...) to `end`: B_t - (t/T) (B_T - end), a bridge from B_0.

    For a Brownian path with equal steps this is Brownian motion given B_T = end, with mean t/T end and
    covariance s (T - t) / T for s <= t.

    Raises:
      ValueError: if the path has no step.
    """
    if path.ndim < 1 or path.shape[0] < 2:
        raise ValueError(
            f"`brownian_bridge` needs a path (steps + 1, ...). Got {tuple(path.shape)}."
        )
    part = jnp.linspace(0, 1, path.shape[0], dtype=path.dtype)
    part = part.reshape(-1, *(1,) * (path.ndim - 1))
    return path - part * (path[-1:] - jnp.asarray(end, path.dtype))


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

    def step(t: Array, x: Array, noise: Array) -> Array:
        spread = jnp.asarray(diffusion(t, x))
        push = spread @ noise if spread.ndim == x.ndim + 1 else spread * noise
        return x + drift(t, x) * dt + push

    return _solve(step, start, increments, dt)


def milstein(
    drift: Coefficient, diffusion: Coefficient, start: Array, increments: Array, *, dt: float
) -> Array:
    """`euler_maruyama` with Milstein's term b b_x (dB^2 - dt)/2: strong order 1.

    For diagonal noise: b(t, x) has the shape of x, each entry has its own motion, and b's entry depends
    on that entry of x alone. A jvp computes b_x. Arguments and result are those of `euler_maruyama`.

    Raises:
      ValueError: if dt is not positive, or b is not of the shape of x.
    """
    check_positive("milstein", "dt", dt)

    def step(t: Array, x: Array, noise: Array) -> Array:
        spread = jnp.asarray(diffusion(t, x))
        if spread.shape != x.shape:
            raise ValueError(
                f"`milstein` needs a diffusion of the shape of x, {tuple(x.shape)}: one motion per "
                f"entry. Got {tuple(spread.shape)}. For shared motions use `euler_maruyama`."
            )
        _, slope = jax.jvp(lambda y: jnp.asarray(diffusion(t, y)), (x,), (spread,))
        return x + drift(t, x) * dt + spread * noise + slope * (noise**2 - dt) / 2

    return _solve(step, start, increments, dt)


def _solve(
    step: Callable[[Array, Array, Array], Array], start: Array, increments: Array, dt: float
) -> Array:
    first = jnp.asarray(start, increments.dtype)
    times = dt * jnp.arange(increments.shape[0], dtype=increments.dtype)

    def advance(x: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        new = step(now[0], x, now[1]).astype(x.dtype)
        return new, new

    _, path = jax.lax.scan(advance, first, (times, increments))
    return jnp.concatenate([first[None], path])


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
