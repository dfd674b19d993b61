"""Log marginals beside scipy's densities and sampled predictive probabilities."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import moment_jax as mj
from moment_jax.objectives import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    class_probabilities,
)
from moment_jax.objectives import log_marginal as uncompiled

T, D = 3, 2
log_marginal = jax.jit(uncompiled)
value_and_grad = jax.jit(jax.value_and_grad(uncompiled, argnums=(0, 2, 3)))
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
    return noise * np.eye(D) if noise.ndim == 0 else np.diag(noise) if noise.ndim == 1 else noise


@every_noise
@pytest.mark.parametrize("rank", [D, 1])
def test_vector_against_scipy(noise, rank):
    target, mean, cov = normal(0, D), normal(1, D), random_cov(2, D, rank)
    for form, dense in ((cov, cov), (np.diagonal(cov), np.diag(np.diagonal(cov)))):
        exact = scipy.stats.multivariate_normal(mean, dense + noise_block(noise)).logpdf(target)
        value = log_marginal(Gaussian(noise), target, mean, form)
        np.testing.assert_allclose(value, exact, atol=1e-10)


@every_noise
@pytest.mark.parametrize("rank", [T * D, 2])
def test_sequence_against_scipy(noise, rank):
    """Eq. 13 with noise, also where the propagated covariance alone is singular."""
    target, mean, cov = normal(3, T, D), normal(4, T, D), random_cov(5, T * D, rank)
    total = cov + np.kron(np.eye(T), noise_block(noise))
    exact = scipy.stats.multivariate_normal(mean.ravel(), total).logpdf(target.ravel())
    value = log_marginal(Gaussian(noise), target, mean, cov.reshape(T, D, T, D))
    np.testing.assert_allclose(value, exact, atol=1e-10)


@every_noise
@pytest.mark.parametrize("structure", [mj.Diagonal, mj.TokenBlock, mj.Full])
def test_structures_and_their_dense_form_agree(noise, structure):
    cov = structure.project(random_cov(6, T * D).reshape(T, D, T, D))
    target, mean = normal(7, T, D), normal(8, T, D)
    dense = log_marginal(Gaussian(noise), target, mean, cov.to_dense())
    np.testing.assert_allclose(log_marginal(Gaussian(noise), target, mean, cov), dense, atol=1e-10)
    if structure is mj.Diagonal:
        value = log_marginal(Gaussian(noise), target, mean, cov.variance())
        np.testing.assert_allclose(value, dense, atol=1e-10)


@pytest.mark.parametrize("full", [False, True])
def test_categorical_is_the_logarithm_of_the_class_probability(full):
    mean, cov = normal(9, 4), random_cov(10, 4)
    cov = cov if full else np.diagonal(cov)
    probabilities = jax.jit(partial(class_probabilities, num_points=256))(mean, cov)
    for label in range(4):
        value = log_marginal(Categorical(num_points=256), jnp.asarray(label), mean, cov)
        np.testing.assert_allclose(value, np.log(probabilities[label]), atol=1e-10)


def test_categorical_is_finite_where_the_probability_underflows():
    mean = jnp.asarray([500.0, -500.0, 0.0], jnp.float32)
    for cov in (jnp.zeros(3, jnp.float32), jnp.ones((3, 3), jnp.float32)):
        value, (_, *grads) = value_and_grad(Categorical(), jnp.asarray(1), mean, cov)
        assert -1100 < value < -900
        assert all(np.all(np.isfinite(leaf)) for leaf in grads)
        np.testing.assert_allclose(grads[0], jnp.asarray([-1.0, 1.0, 0.0]), atol=1e-5)


@every_noise
def test_gradients_are_finite_without_uncertainty(noise):
    dtype = np.float32
    target, mean = normal(11, T, D).astype(dtype), normal(12, T, D).astype(dtype)
    for shape in ((T, D), (T, D, T, D)):
        value, grads = value_and_grad(
            Gaussian(noise.astype(dtype)), target, mean, np.zeros(shape, dtype)
        )
        assert value.dtype == dtype
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


@every_noise
def test_gradient_against_differences(noise):
    target, mean, cov = normal(13, D), normal(14, D), random_cov(15, D)
    step, shift = 1e-5, 0.1 * cov

    def value(t):
        return log_marginal(Gaussian(noise), target, mean + t, cov + t * shift)

    difference = (value(step) - value(-step)) / (2 * step)
    np.testing.assert_allclose(jax.jit(jax.grad(value))(0.0), difference, rtol=1e-7, atol=1e-7)


@every_noise
def test_jit_and_vmap(noise):
    targets, means = normal(16, 2, D), normal(17, 2, D)
    covs = np.stack([random_cov(18, D), random_cov(19, D)])
    loop = [uncompiled(Gaussian(noise), targets[n], means[n], covs[n]) for n in range(2)]
    batch = jax.jit(jax.vmap(uncompiled, in_axes=(None, 0, 0, 0)))
    np.testing.assert_allclose(
        batch(Gaussian(noise), targets, means, covs), np.stack(loop), atol=1e-10
    )


def test_bad_input():
    with pytest.raises(TypeError, match="gaussian_negative_log_likelihood"):
        uncompiled(HeteroscedasticGaussian(), jnp.ones(1), jnp.ones(2), jnp.ones(2))
    with pytest.raises(ValueError, match=r"target\.shape == mean\.shape"):
        uncompiled(Gaussian(1.0), jnp.ones(2), jnp.ones(3), jnp.ones(3))
    with pytest.raises(ValueError, match="integer class index"):
        uncompiled(Categorical(), jnp.asarray(0.0), jnp.ones(3), jnp.ones(3))
