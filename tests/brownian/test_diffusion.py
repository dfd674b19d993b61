"""Walks, the heat equation and diffusion maps: known solutions and known coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import spearmanr

import moment_jax as mj
from tests.brownian.chains import sphere_tokens
from tests.builders import assert_close

brownian = mj.brownian


def heat_error(size, rate):
    """Largest error at time 0.02 on the unit ring, diffusivity 0.7, against the Fourier solution."""
    dx, diffusivity, time = 1 / size, 0.7, 0.02
    places = jnp.arange(size) * dx
    waves = {1: 0.5, 3: 0.2}
    steps = round(diffusivity * time / (rate * dx**2))
    start = 1 + sum(a * jnp.cos(2 * jnp.pi * k * places) for k, a in waves.items())
    end = 1 + sum(
        a * np.exp(-diffusivity * (2 * np.pi * k) ** 2 * time) * jnp.cos(2 * jnp.pi * k * places)
        for k, a in waves.items()
    )
    found = brownian.heat_equation(start, diffusivity=diffusivity, dx=dx, time=time, steps=steps)
    assert_close(found.sum(), start.sum())
    return float(jnp.max(jnp.abs(found - end)))


def test_heat_equation_converges_at_second_order_in_the_grid():
    errors = [heat_error(size, 0.35) for size in (25, 50, 100)]
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    np.testing.assert_allclose(orders, 2, atol=0.1)
    assert np.log2(heat_error(25, 1 / 6) / heat_error(50, 1 / 6)) > 3.5


def test_heat_step_is_a_walk_on_the_grid():
    density = jax.random.dirichlet(jax.random.key(0), jnp.ones(9))
    rate = 0.3
    walk = brownian.grid_walk(9, stay=1 - 2 * rate, dtype=jnp.float64)
    stepped = brownian.heat_step(density, diffusivity=rate, dx=1.0, dt=1.0)
    assert_close(stepped, brownian.propagate(walk, density))
    assert stepped.min() >= 0


def test_walk_on_a_graph_has_the_degrees_as_its_law():
    weights = jax.random.uniform(jax.random.key(1), (6, 6))
    adjacency = weights + weights.T
    walk = brownian.graph_walk(adjacency)
    law = brownian.stationary(walk)
    assert_close(law, adjacency.sum(axis=0) / adjacency.sum())
    assert brownian.detailed_balance_gap(walk, law) < 1e-12


def test_sampled_walks_visit_states_as_the_law_says():
    walk = brownian.transition_matrix(sphere_tokens(6, 4))
    keys = jax.random.split(jax.random.key(2), 20_000)
    ends = jax.vmap(lambda k: brownian.sample_walk(k, walk, 1, 3))(keys)
    assert ends.shape == (20_000, 4)
    assert jnp.all(ends[:, 0] == 1)
    expected = brownian.k_step(walk, 3)[1]
    share = jnp.bincount(ends[:, 3], length=6) / 20_000
    assert jnp.all(jnp.abs(share - expected) < 4.5 * jnp.sqrt(expected / 20_000))


def test_diffusion_distance_is_the_distance_in_the_map():
    points = jax.random.normal(jax.random.key(3), (12, 3))
    kernel = brownian.gaussian_kernel(points, points, bandwidth=1.0)
    for time in (0, 1, 3):
        coordinates = brownian.kernel_diffusion_map(kernel, count=11, time=time).coordinates
        law = brownian.kernel_stationary(kernel)
        distances = brownian.diffusion_distances(brownian.row_normalize(kernel), law, time)
        assert_close(brownian.squared_distances(coordinates, coordinates), distances**2, 1e-9)


def test_a_noisy_circle_is_found():
    angle = jax.random.uniform(jax.random.key(4), (400,), maxval=2 * jnp.pi)
    points = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    points = jnp.concatenate([points, jnp.zeros((400, 3))], axis=1)
    points = points + 0.05 * jax.random.normal(jax.random.key(5), points.shape)
    found = brownian.diffusion_map(points).coordinates
    recovered = np.asarray(jnp.arctan2(found[:, 1], found[:, 0]))
    # Up to a rotation and a reflection: measure angles from the first point on.
    correlations = []
    for sign in (1, -1):
        turned = np.mod(sign * (recovered - recovered[0]), 2 * np.pi)
        truth = np.mod(np.asarray(angle - angle[0]), 2 * np.pi)
        away = np.minimum(truth, 2 * np.pi - truth) > 0.2  # either end may be seen on the other
        correlations.append(spearmanr(turned[away], truth[away]).statistic)
    assert max(correlations) > 0.98


def test_a_swiss_roll_is_unrolled():
    keys = jax.random.split(jax.random.key(6), 3)
    turn = 1.5 * jnp.pi * (1 + 2 * jax.random.uniform(keys[0], (1000,)))
    height = 10 * jax.random.uniform(keys[1], (1000,))
    roll = jnp.stack([turn * jnp.cos(turn), height, turn * jnp.sin(turn)], axis=1)
    roll = roll + 0.1 * jax.random.normal(keys[2], roll.shape)
    found = brownian.diffusion_map(roll, count=1)
    assert abs(spearmanr(found.coordinates[:, 0], turn).statistic) > 0.95
    assert found.residuals.max() < 1e-10


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: brownian.diffusion_map(jnp.ones((1, 2))), "two points"),
        (lambda: brownian.diffusion_map(jnp.ones((5, 2))), "coincide"),
        (lambda: brownian.diffusion_map(jnp.eye(4), bandwidth=0.0), "bandwidth > 0"),
        (lambda: brownian.diffusion_map(jnp.eye(4), count=4), "T - 1"),
        (lambda: brownian.kernel_diffusion_map(jnp.array([[1.0, 2.0], [0.0, 1.0]]), count=1),
         "symmetric"),
        (lambda: brownian.diffusion_distances(jnp.eye(2), jnp.ones(2) / 2, -1), "time >= 0"),
        (lambda: brownian.heat_step(jnp.ones(4), diffusivity=1.0, dx=1.0, dt=0.6), "1/2"),
        (lambda: brownian.heat_equation(jnp.ones(4), diffusivity=1.0, dx=0.1, time=1.0, steps=9),
         "as many steps"),
        (lambda: brownian.heat_step(jnp.ones(4), diffusivity=1.0, dx=0.0, dt=0.6), "dx > 0"),
        (lambda: brownian.grid_walk(2), "size >= 3"),
        (lambda: brownian.graph_walk(jnp.array([[0.0, 1.0], [0.0, 0.0]])), "Row 1"),
        (lambda: brownian.median_bandwidth(jnp.ones((3, 2)), neighbors=3), "neighbors < T"),
        (lambda: brownian.sample_walk(jax.random.key(0), jnp.eye(2), 0, -1), "steps >= 0"),
    ],
)  # fmt: skip
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
