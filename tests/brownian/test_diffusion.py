"""Diffusion maps: known distances and known coordinates."""

import jax
import numpy as np
from scipy.stats import spearmanr

import moment_jax as mj
from tests.builders import assert_close

brownian = mj.brownian
diffusion_map = jax.jit(brownian.diffusion_map)


def test_diffusion_distance_is_the_distance_in_the_map():
    points = np.random.default_rng(3).normal(size=(12, 3))
    walk = brownian.row_normalize(brownian.gaussian_kernel(points, points, bandwidth=1.0))
    walk, law = np.asarray(walk), np.asarray(brownian.stationary(walk))
    for time in (0, 1, 3):
        found = brownian.diffusion_map(points, count=11, time=time, bandwidth=1.0, density_power=0)
        assert_close(found.law, law)
        # sqrt(sum_k (P^t_ik - P^t_jk)^2 / p_k), from the powers of P
        weighted = np.linalg.matrix_power(walk, time) / np.sqrt(law)[None, :]
        distances = np.sum((weighted[:, None] - weighted[None]) ** 2, axis=-1)
        apart = np.asarray(found.coordinates)[:, None] - np.asarray(found.coordinates)[None]
        assert_close(np.sum(apart**2, axis=-1), distances, 1e-9)


def noisy(curve, noise):
    """Points (400, 5) near a curve in two or three dimensions."""
    x = np.stack([*curve, *np.zeros((5 - len(curve), 400))], axis=1)
    return x + noise * np.random.default_rng(4).normal(size=x.shape)


def test_a_noisy_circle_is_found():
    angle = np.random.default_rng(5).uniform(0, 2 * np.pi, 400)
    found = np.asarray(diffusion_map(noisy([np.cos(angle), np.sin(angle)], 0.05)).coordinates)
    recovered = np.arctan2(found[:, 1], found[:, 0])
    # Up to a rotation and a reflection: measure angles from the first point on.
    correlations = []
    for sign in (1, -1):
        turned = np.mod(sign * (recovered - recovered[0]), 2 * np.pi)
        truth = np.mod(angle - angle[0], 2 * np.pi)
        away = np.minimum(truth, 2 * np.pi - truth) > 0.2  # either end may be seen on the other
        correlations.append(spearmanr(turned[away], truth[away]).statistic)
    assert max(correlations) > 0.98


def test_a_swiss_roll_is_unrolled():
    turn, height = np.random.default_rng(6).uniform(size=(2, 400))
    turn = 1.5 * np.pi * (1 + 2 * turn)
    found = diffusion_map(noisy([turn * np.cos(turn), 2 * height, turn * np.sin(turn)], 0.1))
    assert abs(spearmanr(found.coordinates[:, 0], turn).statistic) > 0.95
    assert found.residuals.max() < 1e-10
