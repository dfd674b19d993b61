"""The ELBO and the weight of its KL."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from moment_jax.objectives import Gaussian, elbo, expected_log_likelihood, kl_warmup


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
