"""Gaussian expectations under a Bernoulli likelihood, against a very fine sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.objectives.bernoulli import expected_softplus
from tests.builders import assert_close

MEAN = np.linspace(-8, 8, 17)


def fine_average(fn, mean, variance):
    z = np.linspace(-12, 12, 40_001)
    weights = np.exp(-(z**2) / 2)
    return fn(mean[:, None] + np.sqrt(variance) * z) @ (weights / weights.sum())


@pytest.mark.parametrize(
    ("variance", "error"), [(0.0, 1e-14), (1.0, 1e-9), (4.0, 6e-6), (9.0, 3e-4)]
)
def test_expectations(variance, error):
    given = jnp.asarray(MEAN), jnp.full(MEAN.shape, variance)
    softplus = fine_average(lambda f: np.logaddexp(0, f), MEAN, variance)
    sigmoid = fine_average(lambda f: 1 / (1 + np.exp(-f)), MEAN, variance)
    assert np.abs(expected_softplus(*given) - softplus).max() < error
    assert np.abs(mj.objectives.bernoulli_probabilities(*given) - sigmoid).max() < error


def test_expected_log_likelihood():
    target = np.asarray([[1.0, 0.0], [0.25, 1.0]])
    mean, cov = jnp.asarray([[0.3, -1.0], [2.0, 0.0]]), jnp.asarray([[0.5, 0.0], [1.0, 2.0]])
    fit = mj.objectives.expected_log_likelihood(mj.objectives.Bernoulli(), target, mean, cov)
    flat = np.asarray(mean).ravel()
    softplus = [
        fine_average(lambda f: np.logaddexp(0, f), flat[i : i + 1], v)[0]
        for i, v in enumerate(np.asarray(cov).ravel())
    ]
    assert_close(fit, np.sum(target.ravel() * flat) - np.sum(softplus), 1e-6)
    with pytest.raises(ValueError, match="target"):
        mj.objectives.expected_log_likelihood(mj.objectives.Bernoulli(), target[0], mean, cov)


def test_derivatives_at_no_variance_and_elsewhere():
    for fn in (expected_softplus, mj.objectives.bernoulli_probabilities):
        plain = {expected_softplus: jax.nn.softplus}.get(fn, jax.nn.sigmoid)
        mean = jnp.float64(0.7)
        by_mean, by_variance = jax.grad(fn, argnums=(0, 1))(mean, jnp.float64(0.0))
        assert_close(by_mean, jax.grad(plain)(mean), 1e-12)
        assert_close(by_variance, jax.grad(jax.grad(plain))(mean) / 2, 1e-12)
        slope = jax.grad(fn, argnums=1)(mean, jnp.float64(0.5))
        numeric = (fn(mean, jnp.float64(0.5 + 1e-5)) - fn(mean, jnp.float64(0.5 - 1e-5))) / 2e-5
        assert_close(slope, numeric, 1e-7)
