"""The heat equation, which the density of a Brownian motion solves."""

import jax.numpy as jnp
from jax import Array

from moment_jax.brownian.checks import check_positive


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
