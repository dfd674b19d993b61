"""Brownian paths by their laws, the heat equation by its Fourier solution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from tests.builders import assert_close

brownian = mj.brownian


def increments(seed, count, dt, shape):
    key = jax.random.key(seed)
    return brownian.brownian_increments(key, count, dt=dt, shape=shape, dtype=jnp.float64)


@pytest.fixture(scope="module")
def paths():
    return np.asarray(brownian.brownian_path(increments(0, 64, 1 / 64, (20_000,))))


def within(sample, expected, errors=4.5):
    """The mean over the last axis is within so many standard errors of the expectation."""
    mean, error = np.mean(sample, axis=-1), np.std(sample, axis=-1) / sample.shape[-1] ** 0.5
    assert np.all(np.abs(mean - expected) <= errors * error + 1e-12)


def test_covariance_is_the_earlier_time(paths):
    assert np.all(paths[0] == 0)
    for s, t in [(16, 16), (16, 48), (64, 64)]:
        within(paths[s] * paths[t], min(s, t) / 64)
    within((paths[40] - paths[20]) * paths[20], 0.0)


def test_quadratic_variation_tends_to_time():
    """Mean t, standard deviation sqrt(2 t dt): it falls with the step."""
    for steps in (64, 512):
        path = brownian.brownian_path(increments(1, steps, 2 / steps, (2000,)))
        variation = np.asarray(brownian.quadratic_variation(path))
        within(variation[-1], 2.0)
        within(variation[steps // 2], 1.0)
        np.testing.assert_allclose(np.std(variation[-1]), (4 * 2 / steps) ** 0.5, rtol=0.1)


def heat_error(size, rate):
    """Largest error at time 0.02 on the unit ring, diffusivity 0.7, against the Fourier solution."""
    dx, diffusivity, time = 1 / size, 0.7, 0.02
    places = np.arange(size) * dx
    waves = {1: 0.5, 3: 0.2}
    steps = round(diffusivity * time / (rate * dx**2))

    def solution(time):
        decay = {k: np.exp(-diffusivity * (2 * np.pi * k) ** 2 * time) for k in waves}
        return 1 + sum(a * decay[k] * np.cos(2 * np.pi * k * places) for k, a in waves.items())

    def step(_, density):
        return brownian.heat_step(density, diffusivity=diffusivity, dx=dx, dt=time / steps)

    found = np.asarray(jax.lax.fori_loop(0, steps, step, solution(0.0)))
    assert_close(found.sum(), solution(0.0).sum())
    return np.max(np.abs(found - solution(time)))


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
