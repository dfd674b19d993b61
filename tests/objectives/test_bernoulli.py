"""Bernoulli likelihoods, against a very fine sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from moment_jax.objectives import Bernoulli, bernoulli_probabilities, expected_log_likelihood
from moment_jax.objectives.bernoulli import expected_softplus

LOGITS = np.linspace(-8, 8, 17)
PLAIN = {expected_softplus: jax.nn.softplus, bernoulli_probabilities: jax.nn.sigmoid}


def fine_average(fn, mean, variance):
    z = np.linspace(-12, 12, 4_001)
    weights = np.exp(-(z**2) / 2)
    return np.asarray(fn(mean[:, None] + np.sqrt(variance) * z)) @ (weights / weights.sum())


@pytest.mark.parametrize("fn", PLAIN, ids=["softplus", "sigmoid"])
def test_quadrature_of_the_logistic_function(fn):
    @jax.jit
    def everything(mean, variance):
        by_both = jax.grad(lambda m, v: jnp.sum(fn(m, v)), argnums=(0, 1))
        return fn(mean, variance), *by_both(mean, variance)

    plain = {expected_softplus: lambda f: np.logaddexp(0, f)}.get(fn, scipy.special.expit)
    for variance, error in ((0.0, 1e-14), (1.0, 1e-9), (4.0, 6e-6), (9.0, 3e-4)):
        exact = fine_average(plain, LOGITS, variance)
        assert np.abs(everything(LOGITS, np.full(17, variance))[0] - exact).max() < error
    _, by_mean, by_variance = everything(LOGITS, np.zeros(17))
    slope = jax.vmap(jax.grad(PLAIN[fn]))
    _, curvature = jax.jit(lambda m: jax.jvp(slope, (m,), (jnp.ones_like(m),)))(LOGITS)
    np.testing.assert_allclose(by_mean, slope(LOGITS), atol=1e-12)
    np.testing.assert_allclose(by_variance, curvature / 2, atol=1e-12)
    up, down = (everything(LOGITS, np.full(17, 0.5 + k))[0] for k in (1e-5, -1e-5))
    np.testing.assert_allclose(
        everything(LOGITS, np.full(17, 0.5))[2], (up - down) / 2e-5, atol=1e-7
    )


def test_bernoulli():
    target = np.asarray([[1.0, 0.0], [0.25, 1.0]])
    mean, cov = np.asarray([[0.3, -1.0], [2.0, 0.0]]), np.asarray([[0.5, 0.0], [1.0, 2.0]])
    fit = expected_log_likelihood(Bernoulli(), target, mean, cov)
    softplus = [
        fine_average(lambda f: np.logaddexp(0, f), *np.atleast_1d(m, v))[0]
        for m, v in zip(mean.flat, cov.flat, strict=True)
    ]
    np.testing.assert_allclose(fit, np.sum(target * mean) - np.sum(softplus), rtol=1e-6)


def test_bernoulli_targets_out_of_range():
    mean = np.ones(2)
    score = jax.jit(lambda target: expected_log_likelihood(Bernoulli(), target, mean, mean))
    assert np.isfinite(score(np.array([0.3, 1.0])))
    assert np.isnan(score(np.array([2.0, 0])))
    assert np.isnan(score(np.array([-0.5, 0])))
