"""Draws of every family, and the square root of covariances that they are made with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.posterior import FullNormal, MatrixNormal, Point
from moment_jax.posterior.linalg import psd_sqrt
from tests.posterior.families import (
    IN,
    KERNEL_FAMILIES,
    KEY,
    MEMBERS,
    NUM_SAMPLES,
    OUT,
    TOL,
    assert_gradient,
    compiled_methods,
    dense_cov,
    draws,
    example,
    name_of,
    random,
    random_psd,
    without_variance,
)

BELIEFS = {
    **{f"{name_of(family)}-{name_of(shape)}": example(family, shape) for family, shape in MEMBERS},
    **{f"{family.__name__}-zero": without_variance(family) for family in KERNEL_FAMILIES},
    "MatrixNormal-singular": example(MatrixNormal, rank=1),
    "FullNormal-singular": example(FullNormal, rank=2),
}


@pytest.mark.parametrize("belief", BELIEFS.values(), ids=BELIEFS)
def test_sample_moments(belief):
    deviations = draws(belief) - np.ravel(belief.mean)
    cov = dense_cov(belief)
    variance = np.diag(cov)
    mean_error = np.sqrt(variance / NUM_SAMPLES)
    cov_error = np.sqrt((np.outer(variance, variance) + cov**2) / NUM_SAMPLES)
    # Without variance nothing but rounding is allowed.
    rounding = 100 * np.finfo(np.float64).eps * max(1, np.max(variance))
    assert np.all(np.abs(deviations.mean(0)) <= 5 * mean_error + rounding)
    sampled = deviations.T @ deviations / NUM_SAMPLES
    assert np.all(np.abs(sampled - cov) <= 5 * cov_error + rounding)


def test_a_point_is_not_random():
    point = example(Point)
    np.testing.assert_array_equal(point.sample(KEY), point.mean)


def test_draws_of_a_singular_belief_stay_in_its_range():
    belief = example(FullNormal, rank=2)
    values, vectors = np.linalg.eigh(dense_cov(belief))
    null = vectors[:, values < 1e-10]
    deviation = np.ravel(compiled_methods(belief)["sample"] - belief.mean)
    # The root of a variance that is zero but for rounding.
    rounding = np.sqrt(100 * np.finfo(np.float64).eps * np.max(values))
    assert null.shape[1] == IN * OUT - 2
    assert np.all(np.abs(null.T @ deviation) <= rounding)


@pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=name_of)
def test_sample_gradients(family):
    """The draw is reparametrised: it moves with the belief, against finite differences."""
    target = random(9, IN, OUT)

    @jax.jit
    def loss(belief):
        return jnp.sum((belief.sample(KEY) - target) ** 2)

    belief, direction = example(family), example(family, seed=5)
    gradient = jax.jit(jax.grad(loss))(belief)
    assert_gradient(loss, gradient, belief, direction)


ROOTS = {
    "regular": random_psd(0, 3),
    "identity": np.eye(3),
    "repeated": np.diag([2.0, 2.0, 0.5]),
}


@jax.jit
def root_and_derivatives(cov, first, second):
    """The root, its derivative along `first` and the second one; that in reverse mode too."""

    def along(step):
        return jax.jvp(psd_sqrt, (cov + step * second,), (first,))[1]

    def backward(step):
        return jax.grad(lambda cov: jnp.sum(jnp.sin(psd_sqrt(cov))))(cov + step * first)

    root, forward = psd_sqrt(cov), along(0.0)
    twice = jax.jvp(along, (0.0,), (1.0,))[1]
    in_reverse = jax.grad(lambda step: jnp.vdot(backward(step), second))(0.0)
    return root, forward, twice, in_reverse


@pytest.mark.parametrize("cov", ROOTS.values(), ids=ROOTS)
def test_psd_sqrt_and_its_derivatives(cov):
    """R R = C, differentiated twice; at repeated eigenvalues too, where eigh has no derivative."""
    first, second = random_psd(1, 3), random_psd(2, 3)
    root, along, twice, in_reverse = root_and_derivatives(cov, first, second)
    other = root_and_derivatives(cov, second, first)[1]
    np.testing.assert_allclose(root, root.T, **TOL)
    np.testing.assert_allclose(root @ root, cov, **TOL)
    np.testing.assert_allclose(root @ along + along @ root, first, **TOL)
    crossed = along @ other + other @ along
    np.testing.assert_allclose(root @ twice + twice @ root + crossed, np.zeros((3, 3)), **TOL)
    expected = np.sum(np.cos(root) * twice - np.sin(root) * np.asarray(along) * other)
    np.testing.assert_allclose(in_reverse, expected, **TOL)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_psd_sqrt_of_a_singular_matrix(rank):
    cov, weights = random_psd(4, 3, rank), random_psd(1, 3)
    root, gradient = jax.jit(
        lambda cov: (psd_sqrt(cov), jax.grad(lambda cov: jnp.vdot(psd_sqrt(cov), weights))(cov))
    )(cov)
    np.testing.assert_allclose(root @ root, cov, **TOL)
    # By the equation, |gradient| <= |weights| / (the least positive eigenvalue of the root):
    # rounding in the null space does not come back multiplied by 1e8.
    values = np.linalg.eigvalsh(cov)
    least = np.sqrt(np.min(values[values > 1e-10], initial=np.inf))
    assert np.linalg.norm(gradient) <= np.linalg.norm(weights) / least


def test_psd_sqrt_forgives_a_hair_below_zero():
    np.testing.assert_allclose(psd_sqrt(np.diag([1.0, -1e-18])), np.diag([1.0, 0.0]), **TOL)
