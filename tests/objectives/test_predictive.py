"""Predictive probabilities against sampling and quadrature; variances against sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.objectives import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    log_class_probabilities,
    predictive_gaussian,
)
from moment_jax.objectives import class_probabilities as uncompiled

C = 10
class_probabilities = jax.jit(uncompiled, static_argnames="num_points")
probability_slopes = jax.jit(jax.jacrev(uncompiled, argnums=(0, 1)))
SCALES = [0.3, 1.0, 2.0, 3.0, 5.0]


def problem(seed, scale, rank):
    """Mean logits and a factor of their covariance; rank 0 stands for independent logits."""
    rng = np.random.default_rng(seed)
    mean = 2 * rng.normal(size=C)
    factor = (
        rng.normal(size=(C, rank)) / np.sqrt(rank) if rank else np.diag(rng.uniform(0.5, 1.5, C))
    )
    return mean, scale * factor


@pytest.mark.parametrize("rank", [0, 3, C])
@pytest.mark.parametrize("scale", SCALES)
def test_against_sampling(rank, scale):
    """The expected gap of the NLL, KL(sampled || analytic), is below 0.005 nats."""
    gaps = []
    for seed in range(6):
        mean, factor = problem(seed, scale, rank)
        draws = np.random.default_rng(50 + seed).normal(size=(30_000, factor.shape[1]))
        logits = mean + np.concatenate([draws, -draws]) @ factor.T
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        truth = np.mean(weights / weights.sum(axis=1, keepdims=True), axis=0)
        value = np.asarray(class_probabilities(mean, factor @ factor.T))
        gaps.append(truth @ (np.log(truth) - np.log(value)))
    assert np.mean(gaps) < 0.005 * min(1.0, scale / 3)


@pytest.mark.parametrize("scale", SCALES)
def test_two_classes_against_quadrature(scale):
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    difference = 0.7 + scale * nodes
    exact = weights / weights.sum() @ (1 / (1 + np.exp(-difference)))
    cov = scale**2 * jnp.asarray([[0.5, 0.0], [0.0, 0.5]])
    value = class_probabilities(jnp.asarray([0.7, 0.0]), cov)
    assert abs(value[0] - exact) < 0.002


@pytest.mark.parametrize("rank", [0, 3, C])
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 1e4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_distribution_with_finite_gradients(rank, scale, dtype):
    mean, factor = problem(0, scale, rank)
    mean, cov = mean.astype(dtype), (factor @ factor.T).astype(dtype)
    for form in (cov, np.diagonal(cov)):
        value = class_probabilities(mean, form)
        grads = probability_slopes(mean, form)
        assert value.dtype == dtype
        assert np.all(value >= 0)
        assert abs(np.sum(value) - 1) < 100 * jnp.finfo(dtype).eps
        assert all(np.all(np.isfinite(leaf)) for leaf in grads)
        np.testing.assert_allclose(np.sum(grads[0], axis=0), 0, atol=1e-4)


def test_without_uncertainty_it_is_the_softmax():
    mean = problem(1, 0.0, 0)[0]
    value = uncompiled(mean, jnp.zeros(C))
    np.testing.assert_allclose(value, jax.nn.softmax(mean), atol=1e-12)


def test_jit_vmap_and_logarithm():
    means = np.stack([problem(seed, 1.0, 0)[0] for seed in range(3)])
    factors = np.stack([problem(seed, 1.0, C)[1] for seed in range(3)])
    covs = factors @ np.swapaxes(factors, 1, 2)
    loop = np.stack([class_probabilities(m, c) for m, c in zip(means, covs, strict=True)])
    np.testing.assert_allclose(jax.jit(jax.vmap(uncompiled))(means, covs), loop, atol=1e-12)
    np.testing.assert_allclose(
        np.exp(jax.jit(jax.vmap(log_class_probabilities))(means, covs)), loop, atol=1e-12
    )


def test_gaussian_total_variance():
    mean, cov = jnp.asarray([1.0, 2.0]), jnp.asarray([[0.5, 0.1], [0.1, 0.3]])
    noise = jnp.asarray([[0.9, 0.4], [0.4, 0.6]])
    for form in (cov, np.diagonal(cov)):
        for given, variance in (
            (0.2, [0.2, 0.2]),
            (np.diagonal(noise), [0.9, 0.6]),
            (noise, [0.9, 0.6]),
        ):
            out_mean, total = predictive_gaussian(mean, form, Gaussian(given))
            np.testing.assert_allclose(out_mean, mean)
            np.testing.assert_allclose(total, np.asarray([0.5, 0.3]) + variance, atol=1e-12)
    sequence = predictive_gaussian(jnp.ones((3, 2)), jnp.ones((3, 2)), Gaussian(noise))[1]
    np.testing.assert_allclose(sequence, [[1.9, 1.6]] * 3, atol=1e-12)


def test_heteroscedastic_total_variance_against_sampling():
    rng = np.random.default_rng(2)
    mean, factor = rng.normal(size=4), 0.4 * rng.normal(size=(4, 4))
    outputs = mean + rng.normal(size=(400_000, 4)) @ factor.T
    samples = outputs[:, :2] + np.exp(outputs[:, 2:] / 2) * rng.normal(size=(400_000, 2))
    out_mean, total = predictive_gaussian(
        jnp.asarray(mean), jnp.asarray(factor @ factor.T), HeteroscedasticGaussian()
    )
    deviations = (samples - np.asarray(out_mean)) ** 2
    for values, exact in ((samples, out_mean), (deviations, total)):
        error = np.std(values, axis=0) / np.sqrt(len(values))
        assert np.all(np.abs(values.mean(axis=0) - exact) < 4.5 * error)


def test_bad_input():
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        uncompiled(jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"\(3,\) or \(3, 3\)"):
        uncompiled(jnp.ones(3), jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="num_points >= 12"):
        uncompiled(jnp.ones(3), jnp.ones(3), num_points=4)
    with pytest.raises(TypeError, match="class_probabilities"):
        predictive_gaussian(jnp.ones(3), jnp.ones(3), Categorical())
    with pytest.raises(ValueError, match="2 D outputs"):
        predictive_gaussian(jnp.ones(3), jnp.ones(3), HeteroscedasticGaussian())
