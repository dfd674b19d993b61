"""The tilted bound: below the expectation, tight where there is little noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.objectives import (
    Categorical,
    expected_log_likelihood,
    expected_log_likelihood_bound,
)

bound = jax.jit(expected_log_likelihood_bound)
exact = jax.jit(expected_log_likelihood)


def problem(seed, scale):
    rng = np.random.default_rng(seed)
    factor = scale * rng.normal(size=(6, 6)) / np.sqrt(6)
    return 2 * rng.normal(size=6), factor @ factor.T


# Mean gap between bound and expectation, as the docstring states it for ten classes, with room.
@pytest.mark.parametrize(("scale", "gap"), [(0.1, 2e-4), (0.3, 2e-3), (1.0, 0.15), (2.0, 1.5)])
def test_below_the_expectation_and_tight_for_little_noise(scale, gap):
    gaps = []
    for seed in range(6):
        mean, cov = problem(seed, scale)
        for form in (cov, np.diagonal(cov)):
            for target in (0, 3):
                likelihood = Categorical(num_points=512)
                gaps.append(exact(likelihood, target, mean, form) - bound(target, mean, form))
    assert np.min(gaps) > -1e-4
    assert np.mean(gaps) < gap


def test_without_noise_it_is_the_log_likelihood():
    mean, cov = problem(0, 0.0)
    expected = mean[2] - np.log(np.exp(mean).sum())
    np.testing.assert_allclose(bound(2, mean, cov), expected, atol=1e-10)


@pytest.mark.parametrize("mean", [np.zeros(6), np.asarray([1e4, -1e4, 0, 0, 1e4, 3])])
def test_gradients_are_finite(mean):
    grad = jax.jit(jax.grad(expected_log_likelihood_bound, argnums=(1, 2)))
    for form in (np.zeros(6), np.zeros((6, 6)), np.eye(6), np.ones((6, 6))):
        grads = grad(1, mean.astype(np.float32), form.astype(np.float32))
        assert all(np.all(np.isfinite(leaf)) for leaf in grads)
        assert grads[0].dtype == jnp.float32


def test_bad_input():
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        expected_log_likelihood_bound(0, jnp.zeros((2, 3)), jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="integer class index"):
        expected_log_likelihood_bound(jnp.zeros(3), jnp.zeros(3), jnp.zeros(3))
