"""Draws of every family, and the square root of covariances that they are made with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moment_jax.posterior import FullNormal, MatrixNormal, Point
from moment_jax.posterior.linalg import psd_sqrt
from tests.posterior.families import (
    IN,
    KERNEL_FAMILIES,
    OUT,
    TENSOR_FAMILIES,
    VECTOR_FAMILIES,
    call_name,
    dense_cov,
    example,
    random,
    random_psd,
    without_variance,
)

NUM_SAMPLES = 20_000
BELIEFS = {
    **{f"{family.__name__}-kernel": example(family) for family in KERNEL_FAMILIES},
    **{f"{family.__name__}-vector": example(family, (IN,)) for family in VECTOR_FAMILIES},
    **{f"{family.__name__}-3d": example(family, (2, 3, 2)) for family in TENSOR_FAMILIES},
    **{f"{family.__name__}-zero": without_variance(family) for family in KERNEL_FAMILIES},
    "MatrixNormal-singular": example(MatrixNormal, rank=1),
    "FullNormal-singular": example(FullNormal, rank=2),
}


@pytest.mark.parametrize("belief", BELIEFS.values(), ids=BELIEFS)
def test_sample_moments(belief):
    keys = jax.random.split(jax.random.key(3), NUM_SAMPLES)
    draws = np.asarray(jax.vmap(belief.sample)(keys))
    assert draws.shape == (NUM_SAMPLES, *belief.shape)
    deviations = draws.reshape(NUM_SAMPLES, -1) - np.ravel(belief.mean)
    cov = dense_cov(belief)
    variance = np.diag(cov)
    # Where there is no variance only rounding is allowed.
    rounding = 1e-12 * max(1.0, variance.max())
    mean_error = np.sqrt(variance / NUM_SAMPLES)
    assert np.all(np.abs(deviations.mean(0)) <= 5 * mean_error + np.sqrt(rounding))
    cov_error = np.sqrt((np.outer(variance, variance) + cov**2) / NUM_SAMPLES)
    sampled = deviations.T @ deviations / NUM_SAMPLES
    assert np.all(np.abs(sampled - cov) <= 5 * cov_error + rounding)


def test_a_point_is_not_random():
    point = example(Point)
    np.testing.assert_array_equal(point.sample(jax.random.key(0)), point.mean)


def test_draws_of_a_singular_belief_stay_in_its_range():
    belief = example(FullNormal, rank=2)
    values, vectors = np.linalg.eigh(dense_cov(belief))
    null = vectors[:, values < 1e-10]
    deviation = np.ravel(belief.sample(jax.random.key(0)) - belief.mean)
    # The root of an eigenvalue that is zero but for rounding.
    assert np.all(np.abs(null.T @ deviation) <= 1e-6)


@pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=call_name)
def test_sample_gradients(family):
    target = random(9, IN, OUT)

    def loss(belief):
        return jnp.sum((belief.sample(jax.random.key(0)) - target) ** 2)

    check_grads(jax.jit(loss), (example(family),), order=1)


ROOTS = {
    "regular": random_psd(0, 4),
    "identity": jnp.eye(3),
    "repeated": jnp.diag(jnp.array([2.0, 2.0, 0.5])),
    "one": jnp.array([[4.0]]),
}


@pytest.mark.parametrize("cov", ROOTS.values(), ids=ROOTS)
def test_psd_sqrt(cov):
    root = psd_sqrt(cov)
    np.testing.assert_allclose(root @ root, cov, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(root, root.T, rtol=1e-10, atol=1e-10)
    # Repeated eigenvalues included, where the derivative of eigh is not finite.
    check_grads(jax.jit(psd_sqrt), (cov,), order=2)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_psd_sqrt_of_a_singular_matrix(rank):
    cov = random_psd(4, 3, rank)
    root = psd_sqrt(cov)
    np.testing.assert_allclose(root @ root, cov, rtol=1e-10, atol=1e-10)
    gradient = jax.grad(lambda cov: jnp.sum(psd_sqrt(cov) * random(1, 3, 3)))(cov)
    assert jnp.all(jnp.isfinite(gradient))
    # Rounding in the null space does not come back multiplied by 1e8.
    values = jnp.linalg.eigvalsh(cov)
    smallest = jnp.min(jnp.where(values > 1e-10, values, jnp.inf))
    assert jnp.max(jnp.abs(gradient)) <= 10 / jnp.sqrt(smallest)


def test_psd_sqrt_forgives_a_hair_below_zero():
    cov = jnp.diag(jnp.array([1.0, -1e-18]))
    np.testing.assert_allclose(psd_sqrt(cov), jnp.diag(jnp.array([1.0, 0.0])))
