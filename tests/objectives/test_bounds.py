"""The ELBO, and the tilted bound for classes."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from moment_jax.objectives import (
    Categorical,
    Gaussian,
    elbo,
    expected_log_likelihood,
    expected_log_likelihood_bound,
    kl_warmup,
)


@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_the_average_over_minibatches_is_the_full_elbo(batch_size):
    values, kl = np.random.default_rng(0).normal(size=6), 2.5
    bound = jax.jit(jax.vmap(partial(elbo, dataset_size=6), (0, None)))
    batches = bound(values.reshape(-1, batch_size), kl)
    np.testing.assert_allclose(np.mean(batches), np.sum(values) - kl, atol=1e-12)


def test_elbo_is_below_the_evidence_and_tight_at_the_posterior():
    """One observation of one Gaussian parameter, y = w + noise: all is known in closed form."""
    noise, target = 0.7, jnp.asarray([1.3])
    evidence = scipy.stats.norm.logpdf(1.3, 0, (1 + noise) ** 0.5)

    @jax.jit
    def bound(mean, variance):
        ell = expected_log_likelihood(Gaussian(noise), target, mean[None], variance[None])
        kl = 0.5 * (variance + mean**2 - 1 - jnp.log(variance))
        return elbo(ell[None], kl, dataset_size=1)

    mean, variance = 1.3 / (1 + noise), noise / (1 + noise)
    np.testing.assert_allclose(bound(mean, variance), evidence, atol=1e-12)
    assert max(bound(mean + 0.3, variance), bound(mean, 2 * variance)) < evidence


def test_kl_warmup_weighs_the_elbo_in_its_own_type():
    @jax.jit
    def value(ells, kl, step):
        weight = kl_warmup(step, 10, 0.8)
        return weight, elbo(ells, kl, dataset_size=100, kl_weight=weight)

    for step, weight in {0: 0, 5: 0.4, 10: 0.8, 1000: 0.8}.items():
        found, out = value(np.ones(4, np.float32), np.float32(3), step)
        assert out.dtype == np.float32
        np.testing.assert_allclose([found, out], [weight, 100 - weight * 3], rtol=1e-6)
    np.testing.assert_allclose(kl_warmup(0, 0, 0.8), 0.8)


# -- the tilted bound ---------------------------------------------------------------------------------

with_slopes = jax.jit(jax.value_and_grad(expected_log_likelihood_bound, argnums=(1, 2)))
many_points = jax.jit(partial(expected_log_likelihood, Categorical(num_points=512)))


# Mean gap between bound and expectation, as the docstring states it for ten classes, with room.
@pytest.mark.parametrize(("scale", "gap"), [(0.1, 2e-4), (0.3, 2e-3), (1.0, 0.15), (2.0, 1.5)])
def test_the_bound_is_below_the_expectation_and_tight_for_little_noise(scale, gap):
    gaps = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        factor = scale * rng.normal(size=(6, 6)) / np.sqrt(6)
        mean, cov = (2 * rng.normal(size=6)).astype(np.float32), (factor @ factor.T).astype("f")
        for form in (cov, np.diagonal(cov)):
            for target in (0, 3):
                bound, _ = with_slopes(target, mean, form)
                gaps.append(many_points(target, mean, form) - bound)
    assert np.min(gaps) > -1e-4
    assert np.mean(gaps) < gap


def test_the_bound_without_noise_is_the_log_likelihood():
    mean = 2 * np.random.default_rng(0).normal(size=6)
    expected = mean[2] - np.log(np.exp(mean).sum())
    np.testing.assert_allclose(with_slopes(2, mean, np.zeros(6))[0], expected, atol=1e-10)


def test_gradients_of_the_bound_are_finite():
    for mean in (np.zeros(6), np.asarray([1e4, -1e4, 0, 0, 1e4, 3])):
        for form in (np.zeros(6), np.zeros((6, 6)), np.eye(6), np.ones((6, 6))):
            _, grads = with_slopes(1, mean.astype(np.float32), form.astype(np.float32))
            chex.assert_tree_all_finite(grads)
            assert grads[0].dtype == np.float32
