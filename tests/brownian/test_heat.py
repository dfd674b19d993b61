"""The heat equation against its Fourier solution, and as a random walk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from tests.builders import assert_close

brownian = mj.brownian


def heat_error(size, rate):
    """Largest error at time 0.02 on the unit ring, diffusivity 0.7, against the Fourier solution."""
    dx, diffusivity, time = 1 / size, 0.7, 0.02
    places = np.arange(size) * dx
    waves = {1: 0.5, 3: 0.2}
    steps = round(diffusivity * time / (rate * dx**2))
    start = 1 + sum(a * np.cos(2 * np.pi * k * places) for k, a in waves.items())
    end = 1 + sum(
        a * np.exp(-diffusivity * (2 * np.pi * k) ** 2 * time) * np.cos(2 * np.pi * k * places)
        for k, a in waves.items()
    )
    found = jax.lax.fori_loop(
        0,
        steps,
        lambda _, p: brownian.heat_step(p, diffusivity=diffusivity, dx=dx, dt=time / steps),
        start,
    )
    found, start = np.asarray(found), np.asarray(start)
    assert_close(found.sum(), start.sum())
    return np.max(np.abs(found - np.asarray(end)))


def test_heat_equation_converges_at_second_order_in_the_grid():
    errors = [heat_error(size, 0.35) for size in (25, 50, 100)]
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    np.testing.assert_allclose(orders, 2, atol=0.1)
    assert np.log2(heat_error(25, 1 / 6) / heat_error(50, 1 / 6)) > 3.5


def test_heat_step_is_a_walk_on_the_grid():
    density = np.random.default_rng(0).dirichlet(np.ones(9))
    rate = 0.3
    aside = np.roll(np.eye(9), 1, axis=0) + np.roll(np.eye(9), -1, axis=0)
    walk = (1 - 2 * rate) * np.eye(9) + rate * aside
    stepped = brownian.heat_step(density, diffusivity=rate, dx=1.0, dt=1.0)
    assert_close(stepped, walk.T @ density)
    assert stepped.min() >= 0


@pytest.mark.parametrize(
    ("dx", "dt", "words"), [(1.0, 0.6, "1/2.*as many steps"), (0.0, 0.6, "dx > 0")]
)
def test_bad_input(dx, dt, words):
    with pytest.raises(ValueError, match=words):
        brownian.heat_step(jnp.ones(4), diffusivity=1.0, dx=dx, dt=dt)
