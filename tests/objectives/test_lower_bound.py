"""The ELBO's scaling, its warm-up, and its sampled data term."""

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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_elbo_keeps_its_dtype_under_jit(dtype):
    @jax.jit
    def value(ells, kl, step):
        return elbo(ells, kl, dataset_size=100, kl_weight=kl_warmup(step, 10))

    out = value(jnp.ones(4, dtype), jnp.asarray(3.0, dtype), jnp.asarray(5))
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

    def estimate(num_samples):
        return monte_carlo_expected_log_likelihood(
            log_likelihood, sampler, jax.random.key(0), num_samples
        )

    few = jax.eval_shape(lambda: estimate(2))
    assert [x.shape for x in few] == [(5,), (5,)]
    value, error = estimate(4000)
    f = (inputs @ mean)[:, None], np.sum((inputs @ root) ** 2, axis=1)[:, None]
    score = jax.jit(jax.vmap(expected_log_likelihood, in_axes=(None, 0, 0, 0)))
    exact = score(Gaussian(0.49), targets[:, None], *f)
    assert np.all(np.abs(value - exact) < 4.5 * error)


def test_monte_carlo_does_not_depend_on_the_batch_size():
    def run(batch_size):
        return monte_carlo_expected_log_likelihood(
            jnp.sum,
            lambda key: jax.random.normal(key, (2,)),
            jax.random.key(1),
            10,
            batch_size=batch_size,
        )

    values = [np.stack(run(batch_size)) for batch_size in (3, 64)]
    np.testing.assert_allclose(values[0], values[1], atol=1e-12)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((np.asarray(1.0), 0.0), {}, ValueError, r"of shape \(N,\)"),
        ((np.zeros(0), 0.0), {}, ValueError, r"of shape \(N,\)"),
        ((np.zeros(3), 0.0), {"dataset_size": 0}, ValueError, "dataset_size >= 1"),
        ((np.zeros(3), 0.0), {"dataset_size": 2}, ValueError,
         "at least the 3 examples of the mini-batch. Got 2"),
        ((np.ones(3), np.ones(5)), {}, ValueError,
         r"kl and kl_weight as scalars. Got \(5,\) and \(\)"),
        ((np.ones(3), 1.0), {"kl_weight": -1.0}, ValueError, "kl_weight >= 0. Got -1"),
        ((np.ones(3, int), 1.7), {}, TypeError, r"int64. Use .astype\(jnp.float32\)"),
    ],
)  # fmt: skip
def test_bad_input_of_elbo(args, kwargs, error, match):
    with pytest.raises(error, match=match):
        elbo(*args, **{"dataset_size": 20, **kwargs})


def test_bad_input():
    with pytest.raises(ValueError, match=r"final >= 0. Got -1"):
        kl_warmup(0, 10, -1.0)
    with pytest.raises(ValueError, match="num_steps >= 0"):
        kl_warmup(0, -1)
    with pytest.raises(ValueError, match="num_samples >= 2"):
        monte_carlo_expected_log_likelihood(jnp.sum, jnp.sum, jax.random.key(0), 1)
