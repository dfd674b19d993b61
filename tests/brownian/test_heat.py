"""The heat equation by its Fourier solution, and as a walk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.brownian import heat_step
from tests.builders import assert_close


def heat_error(size, rate):
    """Largest error at time 0.02 on the unit ring, diffusivity 0.7, against the Fourier solution."""
    dx, diffusivity, time = 1 / size, 0.7, 0.02
    steps = round(diffusivity * time / (rate * dx**2))

    def solution(t):
        waves = {1: 0.5, 3: 0.2}
        decay = {k: np.exp(-diffusivity * (2 * np.pi * k) ** 2 * t) for k in waves}
        places = 2 * np.pi * np.arange(size) / size
        return 1 + sum(a * decay[k] * np.cos(k * places) for k, a in waves.items())

    def step(_, density):
        return heat_step(density, diffusivity=diffusivity, dx=dx, dt=time / steps)

    found = np.asarray(jax.lax.fori_loop(0, steps, step, solution(0)))
    assert_close(found.sum(), solution(0).sum())
    return np.max(np.abs(found - solution(time)))


def test_heat_equation_converges_at_second_order_in_the_grid():
    errors = [heat_error(size, 0.35) for size in (25, 50, 100)]
    np.testing.assert_allclose(np.log2(np.array(errors[:-1]) / errors[1:]), 2, atol=0.1)
    assert np.log2(heat_error(25, 1 / 6) / heat_error(50, 1 / 6)) > 3.5


def test_heat_step_is_a_walk_on_the_grid():
    density, rate = np.random.default_rng(0).dirichlet(np.ones(9)), 0.3
    aside = np.roll(np.eye(9), 1, axis=0) + np.roll(np.eye(9), -1, axis=0)
    stepped = heat_step(density, diffusivity=rate, dx=1.0, dt=1.0)
    assert_close(stepped, ((1 - 2 * rate) * np.eye(9) + rate * aside) @ density)
    assert stepped.min() >= 0


@pytest.mark.parametrize(
    ("dx", "dt", "words"), [(1.0, 0.6, "Got 0.6: .*as many steps"), (0.0, 0.6, "dx > 0")]
)
def test_bad_input(dx, dt, words):
    with pytest.raises(ValueError, match=words):
        heat_step(jnp.ones(4), diffusivity=1.0, dx=dx, dt=dt)
