"""The ELBO's scaling, its warm-up, and its sampled data term."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from moment_jax.objectives import (
    Gaussian,
    elbo,
    expected_log_likelihood,
    kl_warmup,
    monte_carlo_expected_log_likelihood,
)


@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_the_average_over_minibatches_is_the_full_elbo(batch_size):
    values, kl = np.random.default_rng(0).normal(size=6), 2.5
    bound = jax.jit(elbo, static_argnames="dataset_size")
    for kl_weight in (1.0, 0.3):
        batches = [
            bound(values[i : i + batch_size], kl, dataset_size=6, kl_weight=kl_weight)
            for i in range(0, 6, batch_size)
        ]
        np.testing.assert_allclose(np.mean(batches), np.sum(values) - kl_weight * kl, atol=1e-12)


def test_elbo_is_below_the_evidence_and_tight_at_the_posterior():
    """One observation of one Gaussian parameter, y = w + noise: all is known in closed form."""
    noise, target = 0.7, jnp.asarray([1.3])
    evidence = scipy.stats.norm.logpdf(1.3, 0, (1 + noise) ** 0.5)

    @jax.jit
    def bound(mean, variance):
        ell = expected_log_likelihood(Gaussian(noise), target, mean[None], variance[None])
        kl = 0.5 * (variance + mean**2 - 1 - jnp.log(variance))
        return elbo(ell[None], kl, dataset_size=1)

    variance = jnp.asarray(noise / (1 + noise))
    mean = target[0] / (1 + noise)
    np.testing.assert_allclose(bound(mean, variance), evidence, atol=1e-12)
    assert bound(mean + 0.3, variance) < evidence
    assert bound(mean, 2 * variance) < evidence


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_elbo_keeps_its_dtype_under_jit(dtype):
    @jax.jit
    def value(ells, kl, step):
        return elbo(ells, kl, dataset_size=100, kl_weight=kl_warmup(step, 10))

    out = value(np.ones(4, dtype), dtype(3), 5)
    assert out.dtype == dtype
    np.testing.assert_allclose(out, 100 - 0.5 * 3)


def test_kl_warmup():
    steps = [0, 5, 10, 1000]
    np.testing.assert_allclose([float(kl_warmup(s, 10, 0.8)) for s in steps], [0, 0.4, 0.8, 0.8])
    np.testing.assert_allclose(kl_warmup(0, 0, 0.8), 0.8)


def test_monte_carlo_estimate():
    """Linear regression: the sampled and the analytic expected log-likelihood of every example."""
    rng = np.random.default_rng(1)
    inputs, targets = rng.normal(size=(5, 3)), rng.normal(size=5)
    mean, root = rng.normal(size=3), 0.3 * rng.normal(size=(3, 3))

    def log_likelihood(weights):
        return jax.scipy.stats.norm.logpdf(targets, inputs @ weights, 0.7)

    def sampler(key):
        return mean + root @ jax.random.normal(key, (3,))

    @jax.jit
    def estimate(key):
        return monte_carlo_expected_log_likelihood(log_likelihood, sampler, key, 4000)

    value, error = estimate(jax.random.key(0))
    assert value.shape == error.shape == (5,)
    f = (inputs @ mean)[:, None], np.sum((inputs @ root) ** 2, axis=1)[:, None]
    score = jax.jit(jax.vmap(expected_log_likelihood, in_axes=(None, 0, 0, 0)))
    exact = score(Gaussian(0.49), targets[:, None], *f)
    assert np.all(np.abs(value - exact) < 4.5 * error)


def test_monte_carlo_does_not_depend_on_the_batch_size():
    def sampler(key):
        return jax.random.normal(key, (2,))

    @jax.jit
    def both(key):
        estimate = partial(monte_carlo_expected_log_likelihood, jnp.sum, sampler, key, 10)
        return [jnp.stack(estimate(batch_size=size)) for size in (3, 64)]

    np.testing.assert_allclose(*both(jax.random.key(1)), atol=1e-12)
