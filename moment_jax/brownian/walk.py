"""Random walks on graphs, and the heat equation as what a walk on a grid becomes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moment_jax.brownian.checks import check_positive, check_square
from moment_jax.brownian.kernels import row_normalize

Array = jax.Array


def graph_walk(adjacency: Array) -> Array:
    """The random walk on a graph: from a node to one of its neighbours, by the edges' weights.

    Args:
      adjacency: nonnegative weights (T, T); symmetric for an undirected graph, whose walk is reversible
        with a law proportional to the degrees.

    Raises:
      ValueError: if a weight is negative or a node has no edge.

    Source: The Brownian motion in the Transformer, section 2.3.
    """
    check_square("graph_walk", adjacency)
    return row_normalize(adjacency)


def sample_walk(key: Array, transition: Array, start: Array | int, steps: int) -> Array:
    """The states of one walk, the start among them: (steps + 1,) integers.

    Args:
      key: a JAX random key.
      transition: (T, T), rows probabilities.
      start: the first state.
      steps: number of steps.

    Raises:
      ValueError: if the matrix is not square or steps is negative.
    """
    check_square("sample_walk", transition)
    if steps < 0:
        raise ValueError(f"`sample_walk` needs steps >= 0. Got {steps}.")
    logits = jnp.log(transition)

    def step(state: Array, key: Array) -> tuple[Array, Array]:
        state = jax.random.categorical(key, logits[state])
        return state, state

    first = jnp.asarray(start, jnp.result_type(int))
    _, states = jax.lax.scan(
        lambda s, k: step(s.astype(first.dtype), k), first, jax.random.split(key, steps)
    )
    return jnp.concatenate([first[None], states.astype(first.dtype)])


def grid_walk(size: int, *, stay: float = 0.5, dtype: jnp.dtype | type = jnp.float32) -> Array:
    """The walk on a ring of `size` places: stay, or go left or right with (1 - stay)/2 each.

    Its chain is the heat equation's explicit step (`heat_step`) with diffusivity dt / dx^2 equal to
    (1 - stay)/2.

    Raises:
      ValueError: if there are fewer than 3 places, or stay is not between 0 and 1.
    """
    if size < 3 or not 0 <= stay <= 1:
        raise ValueError(f"`grid_walk` needs size >= 3 and 0 <= stay <= 1. Got {size} and {stay}.")
    eye = jnp.eye(size, dtype=dtype)
    return stay * eye + (1 - stay) / 2 * (jnp.roll(eye, 1, axis=0) + jnp.roll(eye, -1, axis=0))


def heat_step(density: Array, *, diffusivity: float, dx: float, dt: float) -> Array:
    """One explicit step of dP/dt = diffusivity d^2P/dx^2 on a ring, over the last axis.

    P_i + r (P_(i-1) - 2 P_i + P_(i+1)) with r = diffusivity dt / dx^2: the law of a walk after one step
    (`grid_walk` with stay = 1 - 2 r), so mass is kept, and densities stay nonnegative.

    Raises:
      ValueError: if r is above 1/2, where 1 - 2 r is no probability and the scheme is unstable; or a
        number is not positive.

    Source: The Brownian motion in the Transformer, Eq. 4 and 5.
    """
    rate = _rate("heat_step", diffusivity, dx, dt)
    left, right = jnp.roll(density, 1, axis=-1), jnp.roll(density, -1, axis=-1)
    return density + rate * (left - 2 * density + right)


def heat_equation(
    density: Array, *, diffusivity: float, dx: float, time: float, steps: int
) -> Array:
    """The density after `time`, on a ring of spacing dx, by `steps` explicit steps.

    The error is of second order in dx at a fixed rate diffusivity dt / dx^2, and of fourth at a rate of
    1/6, where the errors of space and time cancel.

    Args:
      density: P at time zero, (..., N).
      diffusivity: the document's D.
      dx: spacing.
      time: duration.
      steps: at least 2 diffusivity time / dx^2.

    Raises:
      ValueError: if the steps are too few (see `heat_step`), or a number is not positive.
    """
    check_positive("heat_equation", "steps", steps)
    dt = time / steps
    _rate("heat_equation", diffusivity, dx, dt)
    return jax.lax.fori_loop(
        0, steps, lambda _, p: heat_step(p, diffusivity=diffusivity, dx=dx, dt=dt), density
    )


def _rate(name: str, diffusivity: float, dx: float, dt: float) -> float:
    for what, value in (("diffusivity", diffusivity), ("dx", dx), ("dt", dt)):
        check_positive(name, what, value)
    rate = diffusivity * dt / dx**2
    if rate > 0.5 * (1 + 1e-12):
        raise ValueError(
            f"`{name}` needs diffusivity dt / dx^2 <= 1/2, a walk's probability of leaving to either "
            f"side. Got {rate:.4g}: take at least {2 * rate:.3g} times as many steps."
        )
    return rate
