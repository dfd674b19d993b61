"""Sampled moments and their standard errors."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.posterior import Factorized, sample_params
from moment_jax.reference import monte_carlo

KEY = jax.random.key(5)
SPREAD = 0.35  # of the logarithm, in what follows
BELIEF = Factorized(jnp.array([0.0, 0.5]), jnp.full(2, SPREAD**2))


def lognormals(draw):
    """Two lognormal variables and their sum."""
    first, second = jnp.exp(draw)
    return jnp.stack([first, second, first + second])


def lognormal_moments():
    """Mean (3,) and covariance (3, 3) of `lognormals`, in closed form."""
    mean = jnp.exp(BELIEF.mean + SPREAD**2 / 2)
    variance = mean**2 * (jnp.exp(SPREAD**2) - 1)
    mix = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    return mix @ mean, (mix * variance[None, :]) @ mix.T


@pytest.fixture(scope="module")
def repeats():
    """400 estimates of 2,000 draws each, for the same moments."""
    keys = jax.random.split(KEY, 400)
    return jax.jit(jax.vmap(lambda key: monte_carlo(lognormals, BELIEF, key, 2000)))(keys)


def test_moments_and_errors_cover_the_truth(repeats):
    """Deviations in standard errors have a mean of zero and a mean square of one."""
    mean, cov = lognormal_moments()
    variance = jnp.diagonal(cov)
    bands = {
        "mean": (repeats.mean - mean[None]) / repeats.mean_error,
        "variance": (repeats.variance - variance[None]) / repeats.variance_error,
        "deviation": (repeats.standard_deviation - jnp.sqrt(variance)[None]) / repeats.sd_error,
    }
    for scores in bands.values():
        assert np.all(np.abs(np.mean(scores, axis=0)) < 5 / 400**0.5)
        # The mean square of 400 standard normal scores has the standard error sqrt(2/400).
        assert np.all(np.abs(np.mean(scores**2, axis=0) - 1) < 5 * (2 / 400) ** 0.5)
    # The error of a Gaussian's deviation would not do.
    ratio = repeats.sd_error / (repeats.standard_deviation / (2 * 1999) ** 0.5)
    scores = bands["deviation"] * ratio
    assert np.all(np.mean(scores**2, axis=0) > 1 + 5 * (2 / 400) ** 0.5)


def draws_and_moments(fn, belief, n, batch_size):
    """The draws themselves, and the moments of the same by batches."""

    @jax.jit
    def both(key):
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(n))
        draws = jax.vmap(lambda key: fn(sample_params(belief, key)))(keys)
        return draws, monte_carlo(fn, belief, key, n, batch_size=batch_size)

    draws, found = both(KEY)
    return np.asarray(draws, np.float64), found


def test_batches_give_the_moments_of_the_same_draws():
    n = 50
    draws, got = draws_and_moments(lognormals, BELIEF, n, batch_size=7)
    centred, sd = draws - draws.mean(0), draws.std(0, ddof=1)
    second, fourth = np.mean(centred**2, 0), np.mean(centred**4, 0)
    variance_error = np.sqrt((fourth - second**2 * (n - 3) / (n - 1)) / n)
    expected = {
        "mean": draws.mean(0), "variance": sd**2, "standard_deviation": sd, "mean_error": sd / n**0.5,
        "variance_error": variance_error, "sd_error": variance_error / (2 * sd),
    }  # fmt: skip
    for field, value in expected.items():
        np.testing.assert_allclose(getattr(got, field), value, rtol=1e-10, err_msg=field)


def test_sums_do_not_cancel_far_from_zero():
    mix = jnp.array([[1.0, 0.5], [0.0, 1.0]], jnp.float32)
    belief = Factorized(jnp.zeros(2, jnp.float32), jnp.ones(2, jnp.float32))
    draws, found = draws_and_moments(lambda draw: draw @ mix + 3000, belief, 900, batch_size=64)
    assert found.variance.dtype == jnp.float32
    np.testing.assert_allclose(found.variance, draws.var(axis=0, ddof=1), rtol=1e-4)


def test_certain_outputs_and_gradients_at_them():
    belief = Factorized(jnp.array([0.1, 1.0], jnp.float32), jnp.array([0.0, 0.5], jnp.float32))

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradient_and_moments(belief):
        moments = monte_carlo(lambda draw: 3 * draw, belief, KEY, 300)
        total = moments.standard_deviation + moments.sd_error + moments.mean_error
        return jnp.sum(total), moments

    gradient, moments = gradient_and_moments(belief)
    chex.assert_tree_all_finite(gradient)
    assert moments.mean[0] == 3 * belief.mean[0]  # bit for bit
    for value in (moments.standard_deviation, moments.mean_error, moments.sd_error):
        assert value[0] <= jnp.finfo(jnp.float32).eps
        assert value[1] > 0.01


def test_moments_have_the_type_of_the_output():
    for dtype in (jnp.float32, jnp.float64):
        belief = Factorized(jnp.zeros(2, dtype), jnp.ones(2, dtype))
        for fn, expected in ((jnp.exp, dtype), (lambda draw: draw > 0, float)):  # frequencies
            sample = partial(monte_carlo, fn, belief, KEY, 300)
            fields = jax.tree.leaves(jax.eval_shape(sample))
            assert {field.dtype for field in fields} == {jnp.dtype(expected)}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_samples": 1}, ValueError, r"needs num_samples >= 2.*Got 1 and 128"),
        ({"batch_size": 0}, ValueError, r"and batch_size >= 1. Got 10 and 0"),
        ({"num_samples": 10.0}, TypeError, "integer"),
        ({"fn": lambda draw: (draw, draw)}, TypeError, r"returns one array. Got tuple"),
    ],
)
def test_bad_arguments(arguments, error, message):
    arguments = {"fn": lognormals, "num_samples": 10, **arguments}
    with pytest.raises(error, match=message):
        monte_carlo(params=BELIEF, key=KEY, **arguments)
