"""Each error states the rule, the value and the fix; labels out of range are NaN in compiled code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.objectives import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    class_probabilities,
    elbo,
    expected_log_likelihood,
    expected_log_likelihood_bound,
    kl_warmup,
    log_marginal,
    monte_carlo_expected_log_likelihood,
    predictive_gaussian,
    token_uncertainty,
)
from moment_jax.objectives.cubature import count_points

ONES = np.ones(3)
INTEGERS = r"int64. Use .astype\(jnp.float32\)"
PAIRS = r"\(3,\) or \(3, 3\)"
# Each case: a function and its arguments, in which a tuple stands for ones of this shape.
BAD_VALUES = [
    (expected_log_likelihood, Gaussian(1.0), (2,), (3,), (3,), "target.shape == mean.shape"),
    (expected_log_likelihood, Gaussian(1.0), (5, 3, 2), (5, 3, 2), (5, 3, 2), "jax.vmap"),
    (expected_log_likelihood, Gaussian(1.0), (3,), (3,), (3, 2), PAIRS),
    (expected_log_likelihood, Gaussian(np.ones(2)), (3,), (3,), (3,), "scalar"),
    (expected_log_likelihood, Gaussian(-1.0), (2,), (2,), (2,), "not negative. Got -1"),
    (expected_log_likelihood, HeteroscedasticGaussian(), (2,), (2,), (2,), "2 D outputs"),
    (expected_log_likelihood, HeteroscedasticGaussian(), (1,), (2,), (2, 3), r"\(2,\) or \(2, 2\)"),
    (expected_log_likelihood, Categorical(), 0, (3,), (2,), PAIRS),
    (expected_log_likelihood, Categorical(), 0, (5, 3), (5, 3), "jax.vmap"),
    (expected_log_likelihood, Categorical(), (3,), (3,), (3,), "one-hot"),
    (expected_log_likelihood, Categorical(num_points=8), 0, (3,), (3,), "num_points >= 12"),
    (expected_log_likelihood, Bernoulli(), (2,), (2, 2), (2, 2), "target"),
    (expected_log_likelihood, Bernoulli(), 2 * ONES, ONES, ONES, "from 0 to 1. Got 2.0 to 2.0"),
    (log_marginal, Gaussian(1.0), (2,), (3,), (3,), "target.shape == mean.shape"),
    (log_marginal, Categorical(), (), (3,), (3,), "integer class index"),
    (expected_log_likelihood_bound, 0, (2, 3), (2, 3), "jax.vmap"),
    (expected_log_likelihood_bound, (3,), (3,), (3,), "integer class index"),
    (class_probabilities, (2, 3), (2, 3), "jax.vmap"),
    (class_probabilities, (3,), (2, 2), PAIRS),
    (token_uncertainty, (2, 3), (2, 3), "token_uncertainty.*jax.vmap"),
    (token_uncertainty, (3,), (2,), PAIRS),
    (predictive_gaussian, (3,), (3,), HeteroscedasticGaussian(), "2 D outputs"),
    (count_points, 32, 10, "num_points >= 40"),
    (kl_warmup, 0, 10, -1.0, "final >= 0. Got -1"),
    (kl_warmup, 0, -1, "num_steps >= 0"),
    (
        monte_carlo_expected_log_likelihood,
        jnp.sum,
        jnp.sum,
        jax.random.key(0),
        1,
        "num_samples >= 2",
    ),
]
BAD_TYPES = [
    (expected_log_likelihood, Categorical(), 0, (3,), mj.Diagonal.zeros((1, 3)), "variance"),
    (expected_log_likelihood, Gaussian(1.0), (3,), (3,), 1.0, "Got float"),
    (expected_log_likelihood, "gaussian", (3,), (3,), (3,), "Got str"),
    (log_marginal, HeteroscedasticGaussian(), (1,), (2,), (2,), "gaussian_negative_log_likelihood"),
    (predictive_gaussian, (3,), (3,), Categorical(), "class_probabilities"),
    *(
        (expected_log_likelihood, likelihood, y, *moments, match)
        for likelihood, y in ((Gaussian(1.0), (3,)), (Bernoulli(), (3,)), (Categorical(), 0))
        for *moments, match in (
            (ONES.astype(int), ONES, INTEGERS),
            (ONES, ONES.astype(int), INTEGERS),
            ([1.0, 1.0, 1.0], ONES, "Got list. Use jnp.asarray"),
        )
    ),
]


@pytest.mark.parametrize(
    ("error", "case"),
    [*((ValueError, case) for case in BAD_VALUES), *((TypeError, case) for case in BAD_TYPES)],
)
def test_bad_input(error, case):
    call, *args, match = case
    with pytest.raises(error, match=match):
        call(*(np.ones(x) if isinstance(x, tuple) else x for x in args))


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((np.asarray(1.0), 0.0), {}, ValueError, r"of shape \(N,\)"),
        ((np.zeros(0), 0.0), {}, ValueError, r"of shape \(N,\)"),
        ((ONES, 0.0), {"dataset_size": 0}, ValueError, "dataset_size >= 1"),
        ((ONES, 0.0), {"dataset_size": 2}, ValueError, "the 3 examples of the mini-batch. Got 2"),
        ((ONES, np.ones(5)), {}, ValueError, r"kl and kl_weight as scalars. Got \(5,\) and \(\)"),
        ((ONES, 1.0), {"kl_weight": -1.0}, ValueError, "kl_weight >= 0. Got -1"),
        ((ONES.astype(int), 1.7), {}, TypeError, INTEGERS),
    ],
)
def test_bad_input_of_elbo(args, kwargs, error, match):
    with pytest.raises(error, match=match):
        elbo(*args, **{"dataset_size": 20, **kwargs})


def test_too_few_points():
    for function in (class_probabilities, token_uncertainty):
        with pytest.raises(ValueError, match="num_points >= 12"):
            function(ONES, ONES, num_points=4)


def test_a_label_out_of_range():
    """An error if it is known; NaN in compiled code, for the default with a gradient of NaN."""
    mean, cov = np.arange(4.0), np.ones(4)
    scores = (
        lambda label, mean: expected_log_likelihood(Categorical(), label, mean, cov),
        lambda label, mean: log_marginal(Categorical(), label, mean, cov),
        lambda label, mean: expected_log_likelihood_bound(label, mean, cov),
    )
    for label in (4, -1):
        for score in scores:
            for known in (label, np.asarray(label), jnp.asarray(label)):
                with pytest.raises(ValueError, match=f"index from 0 to 3. Got {label}"):
                    score(known, mean)
            with pytest.raises(ValueError, match=f"Got {label}"):
                jax.eval_shape(lambda m, score=score, label=label: score(label, m), mean)

    @jax.jit
    @jax.vmap
    def compiled(label):
        return jax.grad(scores[0], 1)(label, mean), *(score(label, mean) for score in scores)

    slopes, *values = compiled(np.array([0, 4, -1]))
    for missing in (np.isnan(slopes).all(axis=1), *map(np.isnan, values)):
        assert list(missing) == [False, True, True]
