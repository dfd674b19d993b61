"""Moments of pi and expected divergences under random logits, against sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from tests.builders import ALL_STRUCTURES, assert_close, random_cov, random_psd

T, K = 3, 5
MEAN = jax.random.normal(jax.random.key(0), (T, K), jnp.float64)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_law_of_a_code_is_the_mean_of_pi(structure):
    cov = random_cov(jax.random.key(1), structure, (T, K), 0.5)
    mean, pi_cov = mj.discrete.category_moments(MEAN, cov)
    log_probs = mj.discrete.log_category_probabilities(MEAN, cov)
    assert isinstance(pi_cov, structure)
    assert_close(jnp.exp(log_probs), mean, 1e-12)
    assert_close(jnp.sum(mean, axis=1), jnp.ones(T), 1e-12)


def test_codes_drawn_through_the_weights_have_that_law():
    """First logits, then a code: as often as one draw from E[pi] would have it."""
    cov = random_cov(jax.random.key(2), mj.Full, (T, K), 1.0)
    root = jnp.linalg.cholesky(cov.to_dense().reshape(T * K, T * K))
    keys = jax.random.split(jax.random.key(3))
    number = 40_000
    noise = (jax.random.normal(keys[0], (number, T * K)) @ root.T).reshape(number, T, K)
    codes = mj.discrete.gumbel_max(keys[1], MEAN[None] + noise)
    shares = jnp.mean(jax.nn.one_hot(codes, K), axis=0)
    expected = jnp.exp(mj.discrete.log_category_probabilities(MEAN, cov))
    error = jnp.sqrt(expected * (1 - expected) / number)
    # The transform's own error, 0.5 % of E[pi] at a logit sd of 1, comes on top of the sampling's.
    assert (jnp.abs(shares - expected) < 4 * error + 0.01 * expected).all()
    at_mean = jax.nn.softmax(MEAN)
    assert (jnp.abs(shares - at_mean) > 8 * error).any()


def test_masked_categories_are_impossible():
    mask = jnp.asarray(np.random.default_rng(0).random((T, K)) < 0.6).at[:, 0].set(True)
    cov = random_cov(jax.random.key(4), mj.Separable, (T, K))

    def value(mean):
        log_probs = mj.discrete.log_category_probabilities(mean, cov, mask)
        return jnp.sum(jnp.where(mask, log_probs, 0)), log_probs

    slope, log_probs = jax.grad(value, has_aux=True)(MEAN)
    assert ((log_probs == -jnp.inf) == ~mask).all()
    assert jnp.isfinite(slope).all()


@pytest.mark.parametrize("pairs", [False, True])
def test_expected_kl_against_sampling(pairs):
    cov = random_psd(jax.random.key(5), K)
    cov = cov if pairs else jnp.diagonal(cov)
    prior = jnp.asarray([0.1, 0.4, 0.2, 0.2, 0.1])
    root = jnp.linalg.cholesky(cov) if pairs else jnp.diag(jnp.sqrt(cov))
    draws = MEAN[:1] + jax.random.normal(jax.random.key(6), (200_000, K)) @ root.T
    for log_prior in (None, jnp.log(prior)):
        values = mj.discrete.categorical_kl(
            draws, log_prior if log_prior is None else log_prior[None]
        )
        exact = mj.discrete.expected_categorical_kl(MEAN[0], cov, log_prior)
        error = jnp.std(values) / len(values) ** 0.5
        assert jnp.abs(exact - jnp.mean(values)) < 4 * error + 2e-3  # the cubature's own error
        pi = mj.objectives.class_probabilities(MEAN[0], cov)
        assert exact > mj.discrete.categorical_kl(jnp.log(pi), log_prior)  # convexity


def test_expected_kl_of_certain_logits():
    zero = jnp.zeros((K, K))
    certain = mj.discrete.expected_categorical_kl(MEAN[0], zero)
    assert_close(certain, mj.discrete.categorical_kl(MEAN[0]))
    slope = jax.grad(mj.discrete.expected_categorical_kl, argnums=(0, 1))(MEAN[0], zero)
    assert_close(slope[0], jax.grad(mj.discrete.categorical_kl)(MEAN[0]), 1e-12)
    hessian = jax.hessian(mj.discrete.categorical_kl)(MEAN[0])
    assert_close(slope[1], hessian / 2, 1e-10)


@pytest.mark.parametrize("pairs", [False, True])
def test_expected_kl_has_the_derivatives_of_price(pairs):
    """Against finite differences of a very fine cubature: points move, theorems do not."""
    cov = 0.2 * random_psd(jax.random.key(7), K)
    cov, push = (
        (cov, random_psd(jax.random.key(8), K)) if pairs else (jnp.ones(K) * 0.2, jnp.ones(K))
    )

    def value(mean, cov):
        return mj.discrete.expected_categorical_kl(mean, cov, num_points=8192)

    slopes = jax.grad(value, argnums=(0, 1))(MEAN[0], cov)
    step = 1e-4
    along = jnp.linspace(-1.0, 1.0, K)
    numeric = (value(MEAN[0] + step * along, cov) - value(MEAN[0] - step * along, cov)) / (2 * step)
    assert_close(slopes[0] @ along, numeric, 1e-5)
    numeric = (value(MEAN[0], cov + step * push) - value(MEAN[0], cov - step * push)) / (2 * step)
    assert_close(jnp.sum(slopes[1] * push), numeric, 1e-3)


def test_messages():
    with pytest.raises(ValueError, match="prior of the shape"):
        mj.discrete.expected_categorical_kl(MEAN[0], jnp.ones(K), jnp.zeros(2))
    with pytest.raises(TypeError, match="as an array"):
        mj.discrete.expected_categorical_kl(MEAN[0], mj.Diagonal.zeros((1, K)))
