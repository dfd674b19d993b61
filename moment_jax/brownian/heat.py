"""The heat equation, as the law of a random walk on a grid."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moment_jax.brownian.checks import check_positive

Array = jax.Array


def heat_step(density: Array, *, diffusivity: float, dx: float, dt: float) -> Array:
    """One explicit step of dP/dt = diffusivity d^2P/dx^2 on a ring, over the last axis.

    P_i + r (P_(i-1) - 2 P_i + P_(i+1)) with r = diffusivity dt / dx^2: the law of a walk after one step
    that goes to either side with probability r, so mass is kept, and densities stay nonnegative.

    Raises:
      ValueError: if r is above 1/2, where 1 - 2 r is no probability and the scheme is unstable; or a
        number is not positive.

    Source: The Brownian motion in the Transformer, Eq. 4 and 5.
    """
    for what, value in (("diffusivity", diffusivity), ("dx", dx), ("dt", dt)):
        check_positive("heat_step", what, value)
    rate = diffusivity * dt / dx**2
    if rate > 0.5 * (1 + 1e-12):
        raise ValueError(
            "`heat_step` needs diffusivity dt / dx^2 <= 1/2, a walk's probability of leaving to either "
            f"side. Got {rate:.4g}: take at least {2 * rate:.3g} times as many steps."
        )
    left, right = jnp.roll(density, 1, axis=-1), jnp.roll(density, -1, axis=-1)
    return density + rate * (left - 2 * density + right)
