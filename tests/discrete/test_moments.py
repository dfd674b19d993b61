"""Moments of pi under random logits, against sampling."""

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from tests.builders import assert_close, random_cov

T, K = 3, 5
MEAN = jax.random.normal(jax.random.key(0), (T, K), jnp.float64)


def test_law_of_a_code_is_the_mean_of_pi_and_masked_categories_are_impossible():
    mask = jnp.asarray(np.random.default_rng(0).random((T, K)) < 0.6).at[:, 0].set(True)

    def laws(cov):
        moments = mj.softmax(MEAN, cov)
        return *moments, mj.discrete.log_category_probabilities(MEAN, cov)

    def masked(mean, cov):
        log_probs = mj.discrete.log_category_probabilities(jnp.where(mask, mean, -jnp.inf), cov)
        return jnp.sum(jnp.where(mask, log_probs, 0)), log_probs

    default = mj.Separable.zeros((T, K), MEAN.dtype)
    assert isinstance(jax.eval_shape(laws, default)[1], mj.Separable)
    run = jax.jit(lambda cov: (laws(cov), jax.grad(masked, has_aux=True)(MEAN, cov)))
    cov = random_cov(jax.random.key(1), mj.Diagonal, (T, K), 0.5)
    (mean, _, log_probs), (slope, of_masked) = run(cov)
    assert_close(np.exp(log_probs), mean, 1e-12)
    assert_close(np.sum(mean, axis=1), np.ones(T), 1e-12)
    assert ((of_masked == -jnp.inf) == ~mask).all()
    assert jnp.isfinite(slope).all()


def test_codes_drawn_through_the_weights_have_that_law():
    """First logits, then a code: as often as one draw from E[pi] would have it."""
    cov = random_cov(jax.random.key(2), mj.Full, (T, K), 1.0)
    number = 40_000

    @jax.jit
    def draw(keys):
        root = jnp.linalg.cholesky(cov.to_dense().reshape(T * K, T * K))
        noise = (jax.random.normal(keys[0], (number, T * K)) @ root.T).reshape(number, T, K)
        codes = mj.discrete.gumbel_max(keys[1], MEAN[None] + noise)
        expected = jnp.exp(mj.discrete.log_category_probabilities(MEAN, cov))
        return jnp.mean(jax.nn.one_hot(codes, K), axis=0), expected, jax.nn.softmax(MEAN)

    shares, expected, at_mean = map(np.asarray, draw(jax.random.split(jax.random.key(3))))
    error = np.sqrt(expected * (1 - expected) / number)
    # The transform's own error, 0.5 % of E[pi] at a logit sd of 1, comes on top of the sampling's.
    assert (np.abs(shares - expected) < 4 * error + 0.01 * expected).all()
    assert (np.abs(shares - at_mean) > 8 * error).any()
