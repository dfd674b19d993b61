"""Predictive probabilities against sampling and quadrature; variances against sampling."""

import functools

import jax
import numpy as np
import pytest
import scipy.stats

from moment_jax.objectives import (
    Gaussian,
    HeteroscedasticGaussian,
    log_class_probabilities,
    predictive_gaussian,
)
from moment_jax.objectives import class_probabilities as uncompiled

C = 10
SCALES = [0.3, 1.0, 2.0, 3.0, 5.0]


compiled = jax.jit(uncompiled)


def problem(seed, scale, rank):
    """Mean logits and a factor of their covariance; rank 0 stands for independent logits."""
    rng = np.random.default_rng(seed)
    mean = 2 * rng.normal(size=C)
    factor = (
        rng.normal(size=(C, rank)) / np.sqrt(rank) if rank else np.diag(rng.uniform(0.5, 1.5, C))
    )
    return mean, scale * factor


@functools.cache
def normal_draws():
    """8,192 draws and their mirror images, spread evenly by a scrambled Sobol sequence."""
    uniform = scipy.stats.qmc.Sobol(C, rng=np.random.default_rng(50)).random_base2(13)
    draws = scipy.stats.norm.ppf(uniform)
    return np.concatenate([draws, -draws])


@pytest.mark.parametrize("rank", [0, 3, C])
@pytest.mark.parametrize("scale", SCALES)
def test_against_sampling(rank, scale):
    """The expected gap of the NLL, KL(sampled || analytic), is below 0.005 nats."""
    gaps = []
    for seed in range(6):
        mean, factor = problem(seed, scale, rank)
        weights = np.exp(mean + normal_draws()[:, : factor.shape[1]] @ factor.T)
        truth = np.mean(weights / weights.sum(axis=1, keepdims=True), axis=0)
        value = np.asarray(compiled(mean, factor @ factor.T))
        gaps.append(truth @ (np.log(truth) - np.log(value)))
    assert np.mean(gaps) < 0.005 * min(1.0, scale / 3)


@pytest.mark.parametrize("scale", SCALES)
def test_two_classes_against_quadrature(scale):
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    exact = weights / weights.sum() @ (1 / (1 + np.exp(-(0.7 + scale * nodes))))
    value = compiled(np.asarray([0.7, 0.0]), scale**2 * np.diag([0.5, 0.5]))
    assert abs(value[0] - exact) < 0.002


def test_without_uncertainty_it_is_the_softmax():
    mean = problem(1, 0.0, 0)[0]
    value = compiled(mean, np.zeros((C, C)))
    np.testing.assert_allclose(value, np.exp(mean) / np.exp(mean).sum(), atol=1e-12)


def test_vmap_and_logarithm():
    means, factors = map(np.stack, zip(*(problem(seed, 1.0, C) for seed in range(3)), strict=True))
    covs = factors @ np.swapaxes(factors, 1, 2)
    loop = np.stack([compiled(m, c) for m, c in zip(means, covs, strict=True)])
    logarithm = jax.jit(jax.vmap(log_class_probabilities))(means, covs)
    np.testing.assert_allclose(np.exp(logarithm), loop, atol=1e-12)


def test_gaussian_total_variance():
    mean, cov = np.asarray([1.0, 2.0]), np.asarray([[0.5, 0.1], [0.1, 0.3]])
    noise = np.asarray([[0.9, 0.4], [0.4, 0.6]])
    noises = {0.2: [0.2, 0.2], "vector": [0.9, 0.6], "matrix": [0.9, 0.6]}
    given = {"vector": np.diagonal(noise), "matrix": noise}
    for form in (cov, np.diagonal(cov)):
        for key, variance in noises.items():
            out_mean, total = predictive_gaussian(mean, form, Gaussian(given.get(key, key)))
            np.testing.assert_allclose(out_mean, mean)
            np.testing.assert_allclose(total, np.asarray([0.5, 0.3]) + variance, atol=1e-12)
    sequence = predictive_gaussian(np.ones((3, 2)), np.ones((3, 2)), Gaussian(noise))[1]
    np.testing.assert_allclose(sequence, [[1.9, 1.6]] * 3, atol=1e-12)


def test_heteroscedastic_total_variance_against_sampling():
    rng = np.random.default_rng(2)
    mean, factor = rng.normal(size=4), 0.4 * rng.normal(size=(4, 4))
    outputs = mean + rng.normal(size=(400_000, 4)) @ factor.T
    samples = outputs[:, :2] + np.exp(outputs[:, 2:] / 2) * rng.normal(size=(400_000, 2))
    out_mean, total = predictive_gaussian(mean, factor @ factor.T, HeteroscedasticGaussian())
    deviations = (samples - np.asarray(out_mean)) ** 2
    for values, exact in ((samples, out_mean), (deviations, total)):
        error = np.std(values, axis=0) / np.sqrt(len(values))
        assert np.all(np.abs(values.mean(axis=0) - exact) < 4.5 * error)
