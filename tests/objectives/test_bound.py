"""The tilted bound: below the expectation, and tight where there is little noise."""

from functools import partial

import jax
import numpy as np
import pytest

from moment_jax.objectives import (
    Categorical,
    expected_log_likelihood,
    expected_log_likelihood_bound,
)

with_slopes = jax.jit(jax.value_and_grad(expected_log_likelihood_bound, argnums=(1, 2)))
many_points = jax.jit(partial(expected_log_likelihood, Categorical(num_points=512)))


def logits(seed, scale):
    rng = np.random.default_rng(seed)
    factor = scale * rng.normal(size=(6, 6)) / np.sqrt(6)
    return 2 * rng.normal(size=6), factor @ factor.T


# Mean gap between bound and expectation, as the docstring states it for ten classes, with room.
@pytest.mark.parametrize(("scale", "gap"), [(0.1, 2e-4), (0.3, 2e-3), (1.0, 0.15), (2.0, 1.5)])
def test_the_bound_is_below_the_expectation_and_tight_for_little_noise(scale, gap):
    gaps = []
    for seed in range(6):
        mean, cov = (part.astype(np.float32) for part in logits(seed, scale))
        for form in (cov, np.diagonal(cov)):
            for target in (0, 3):
                bound, _ = with_slopes(target, mean, form)
                gaps.append(many_points(target, mean, form) - bound)
    assert np.min(gaps) > -1e-4
    assert np.mean(gaps) < gap


def test_the_bound_without_noise_is_the_log_likelihood():
    mean, _ = logits(0, 0.0)
    expected = mean[2] - np.log(np.exp(mean).sum())
    value = jax.jit(expected_log_likelihood_bound)(2, mean, np.zeros(6))
    np.testing.assert_allclose(value, expected, atol=1e-10)


def test_gradients_of_the_bound_are_finite():
    for mean in (np.zeros(6), np.asarray([1e4, -1e4, 0, 0, 1e4, 3])):
        for form in (np.zeros(6), np.zeros((6, 6)), np.eye(6), np.ones((6, 6))):
            _, grads = with_slopes(1, mean.astype(np.float32), form.astype(np.float32))
            assert all(np.all(np.isfinite(leaf)) for leaf in grads)
            assert grads[0].dtype == np.float32
