"""Log marginals beside scipy's densities; their structures are tested with those of the data term."""

import jax
import numpy as np
import pytest
import scipy.stats

from moment_jax.objectives import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    class_probabilities,
)
from moment_jax.objectives import log_marginal as uncompiled

T, D = 3, 2
# Compiled once for each form of the arguments: the value and its gradients.
with_grads = jax.jit(jax.value_and_grad(uncompiled, argnums=(0, 2, 3)))
NOISES = {
    "scalar": np.asarray(0.5),
    "vector": np.asarray([0.3, 1.2]),
    "matrix": np.asarray([[0.9, 0.4], [0.4, 0.6]]),
}
every_noise = pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def random_cov(seed, size, rank=None):
    factor = normal(seed, size, rank or size)
    return factor @ factor.T


def noise_block(noise):
    return noise if noise.ndim == 2 else np.diag(np.broadcast_to(noise, D))


@every_noise
@pytest.mark.parametrize("rank", [D, 1])
def test_vector_against_scipy(noise, rank):
    target, mean, cov = normal(0, D), normal(1, D), random_cov(2, D, rank)
    for form, dense in ((cov, cov), (np.diagonal(cov), np.diag(np.diagonal(cov)))):
        exact = scipy.stats.multivariate_normal(mean, dense + noise_block(noise)).logpdf(target)
        value, _ = with_grads(Gaussian(noise), target, mean, form)
        np.testing.assert_allclose(value, exact, atol=1e-10)


@every_noise
@pytest.mark.parametrize("rank", [T * D, 2])
def test_sequence_against_scipy(noise, rank):
    """Eq. 13 with noise, also where the propagated covariance alone is singular."""
    target, mean, cov = normal(3, T, D), normal(4, T, D), random_cov(5, T * D, rank)
    total = cov + np.kron(np.eye(T), noise_block(noise))
    exact = scipy.stats.multivariate_normal(mean.ravel(), total).logpdf(target.ravel())
    value, _ = with_grads(Gaussian(noise), target, mean, cov.reshape(T, D, T, D))
    np.testing.assert_allclose(value, exact, atol=1e-10)


def test_categorical_is_the_logarithm_of_the_class_probability():
    mean, full = normal(9, 4), random_cov(10, 4)
    probabilities = jax.jit(class_probabilities, static_argnames="num_points")
    for cov in (full, np.diagonal(full)):
        expected = np.log(probabilities(mean, cov, num_points=256))
        values = [with_grads(Categorical(256), np.asarray(k), mean, cov)[0] for k in range(4)]
        np.testing.assert_allclose(values, expected, atol=1e-10)


def test_categorical_is_finite_where_the_probability_underflows():
    mean = np.asarray([500.0, -500.0, 0.0], np.float32)
    for cov in (np.zeros(3, np.float32), np.ones((3, 3), np.float32)):
        value, (_, *grads) = with_grads(Categorical(), np.asarray(1), mean, cov)
        assert -1100 < value < -900
        assert all(np.all(np.isfinite(leaf)) for leaf in grads)
        np.testing.assert_allclose(grads[0], [-1.0, 1.0, 0.0], atol=1e-5)


@every_noise
def test_gradients_are_finite_without_uncertainty(noise):
    target, mean, noise = (
        x.astype(np.float32) for x in (normal(11, T, D), normal(12, T, D), noise)
    )
    for shape in ((T, D), (T, D, T, D)):
        value, grads = with_grads(Gaussian(noise), target, mean, np.zeros(shape, np.float32))
        assert value.dtype == np.float32
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


@every_noise
def test_gradient_against_differences(noise):
    target, mean, cov = normal(13, D), normal(14, D), random_cov(15, D)
    step, shift = 1e-5, 0.1 * cov

    def value(t):
        return with_grads(Gaussian(noise), target, mean + t, cov + t * shift)[0]

    _, (_, by_mean, by_cov) = with_grads(Gaussian(noise), target, mean, cov)
    slope = np.sum(by_mean) + np.vdot(by_cov, shift)
    difference = (value(step) - value(-step)) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=1e-7, atol=1e-7)


@every_noise
def test_jit_and_vmap(noise):
    targets, means = normal(16, 2, D), normal(17, 2, D)
    covs = np.stack([random_cov(18, D), random_cov(19, D)])
    args = Gaussian(noise), targets, means, covs
    loop = [with_grads(args[0], targets[n], means[n], covs[n])[0] for n in range(2)]
    batch = jax.jit(jax.vmap(uncompiled, in_axes=(None, 0, 0, 0)))(*args)
    np.testing.assert_allclose(batch, loop, atol=1e-10)
    alone = uncompiled(args[0], targets[0], means[0], covs[0])
    np.testing.assert_allclose(alone, loop[0], atol=1e-10)


def test_bad_input():
    with pytest.raises(TypeError, match="gaussian_negative_log_likelihood"):
        uncompiled(HeteroscedasticGaussian(), np.ones(1), np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match=r"target\.shape == mean\.shape"):
        uncompiled(Gaussian(1.0), np.ones(2), np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match="integer class index"):
        uncompiled(Categorical(), np.asarray(0.0), np.ones(3), np.ones(3))
