"""Expected log-likelihoods and scores of predictions beside textbook formulas and quadrature."""

from functools import partial

import chex
import jax
import numpy as np
import pytest
import scipy.special
import scipy.stats

import moment_jax as mj
from moment_jax.expectations.quadrature import expected
from moment_jax.objectives import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from moment_jax.objectives import expected_log_likelihood as uncompiled

T, D, C = 3, 2, 4


def score(likelihood, target, mean, cov):
    """Log E[p(target | f)], that of a prediction."""
    cov = mj.Diagonal(cov[None]) if cov.ndim == 1 else mj.Full(cov[None, :, None])
    return likelihood(mj.Moments(mean, cov)).log_prob(target)


# Compiled once for each form of the arguments: the value and its gradients.
with_grads = {
    fn: jax.jit(jax.value_and_grad(fn, argnums=(0, 2, 3), allow_int=True))
    for fn in (uncompiled, score)
}
value_alone = jax.jit(uncompiled)


def expected_log_likelihood(*args):
    return with_grads[uncompiled](*args)[0]


def random_cov(seed, size, scale=0.7):
    factor = np.random.default_rng(seed).normal(size=(size, size))
    return scale**2 * factor @ factor.T / size


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


NOISES = {"scalar": np.asarray(0.5), "vector": np.asarray([0.3, 1.2])}
# Each case: likelihood, target, mean.
CASES = {f"gaussian_{k}": (Gaussian(v), normal(0, D), normal(1, D)) for k, v in NOISES.items()}
CASES["heteroscedastic"] = (HeteroscedasticGaussian(), normal(2, D), normal(3, 2 * D))
CASES["categorical"] = (Categorical(), np.asarray(2), normal(4, C))
SCORES = [(name, uncompiled) for name in CASES]
SCORES += [(name, score) for name in CASES if name != "heteroscedastic"]
every_score = pytest.mark.parametrize(("name", "fn"), SCORES)


def log_density(likelihood, target, f):
    """log p(target | f), spelled out with scipy."""
    if isinstance(likelihood, Gaussian):
        noise = np.asarray(likelihood.noise_variance)
        noise = np.diag(np.broadcast_to(noise, D))
        return np.atleast_1d(scipy.stats.multivariate_normal(cov=noise).logpdf(f - target))
    if isinstance(likelihood, HeteroscedasticGaussian):
        return scipy.stats.norm(f[:, :D], np.exp(f[:, D:] / 2)).logpdf(target).sum(1)
    return f[:, int(target)] - np.log(np.exp(f).sum(1))


def gauss_hermite(size, count):
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    nodes, weights = (
        np.stack(np.meshgrid(*[x] * size, indexing="ij"), axis=-1).reshape(-1, size)
        for x in (nodes, weights / weights.sum())
    )
    return nodes, np.prod(weights, axis=1)


@pytest.mark.parametrize("name", [name for name in CASES if name != "categorical"])
def test_closed_forms_against_quadrature(name):
    """Without noise, that is the log-likelihood. For classes, see `test_cubature`."""
    likelihood, target, mean = CASES[name]
    full = random_cov(9, mean.size, 0.5)
    nodes, weights = gauss_hermite(mean.size, 18 if mean.size > 2 else 8)
    for cov in (full, np.diagonal(full), 0 * full, 0 * np.diagonal(full)):
        matrix = cov if cov.ndim == 2 else np.diag(cov)
        root = np.linalg.cholesky(matrix) if matrix.any() else matrix
        exact = weights @ log_density(likelihood, target, mean + nodes @ root.T)
        value = expected_log_likelihood(likelihood, target, mean, cov)
        np.testing.assert_allclose(value, exact, atol=1e-10)


@pytest.mark.parametrize(("scale", "bound"), [(0.3, 1e-4), (1.0, 0.005), (2.0, 0.025), (3.0, 0.06)])
def test_categorical_error_on_ten_classes(scale, bound):
    """Noise of rank 3 has an exact truth; the mean error is what the docstring states."""
    nodes, weights = gauss_hermite(3, 30)
    errors = []
    for seed in range(10):
        rng = np.random.default_rng(100 + seed)
        mean, factor = 2 * rng.normal(size=10), scale * rng.normal(size=(10, 3)) / np.sqrt(3)
        truth = mean[0] - weights @ np.log(np.exp(mean + nodes @ factor.T).sum(axis=1))
        errors.append(truth - value_alone(Categorical(), 0, mean, factor @ factor.T))
    assert np.mean(np.abs(errors)) < bound


def test_gaussian_sequences_token_by_token():
    blocks = np.stack([random_cov(seed, D) for seed in range(T)])
    target, mean = normal(11, T, D), normal(12, T, D)
    for noise in NOISES.values():
        for cov in (blocks, np.diagonal(blocks, axis1=1, axis2=2)):
            whole = expected_log_likelihood(Gaussian(noise), target, mean, cov)
            each = map(partial(expected_log_likelihood, Gaussian(noise)), target, mean, cov)
            np.testing.assert_allclose(whole, sum(each), atol=1e-10)


@every_score
def test_gradients_are_finite_without_uncertainty(name, fn):
    """And everything stays in float32 where the arguments are."""
    likelihood, target, mean = CASES[name]
    for shape in ((mean.size,), (mean.size, mean.size)):
        args = likelihood, target, mean, np.zeros(shape)
        _, grads = with_grads[fn](*args)
        chex.assert_tree_all_finite(grads)
        narrow = jax.tree.map(
            lambda x: x if np.issubdtype(x.dtype, np.integer) else x.astype(np.float32), args
        )
        results = jax.tree.leaves(jax.eval_shape(with_grads[fn], *narrow))
        assert all(leaf.dtype == np.float32 for leaf in results)


# The gradients for classes follow Price's theorem and are tested with the cubature.
@pytest.mark.parametrize(("name", "fn"), [s for s in SCORES if s[0] != "categorical"])
def test_gradients_against_differences(name, fn):
    likelihood, target, mean = CASES[name]
    cov = random_cov(13, mean.size)
    step, shift = 1e-5, 0.1 * cov

    def value(t):
        return with_grads[fn](likelihood, target, mean + t, cov + t * shift)[0]

    _, (_, by_mean, by_cov) = with_grads[fn](likelihood, target, mean, cov)
    difference = (value(step) - value(-step)) / (2 * step)
    slope = np.sum(by_mean) + np.vdot(by_cov, shift)
    np.testing.assert_allclose(slope, difference, rtol=1e-7, atol=1e-7)


def test_huge_outputs_stay_finite():
    """For classes see `test_cubature`."""
    for mean in ([1e4, 0, -1e4, 0], [-1e4, 0, 1e4, 0]):
        args = (np.asarray(x, np.float32) for x in (np.ones(2), mean, np.ones(4)))
        value, (_, *grads) = with_grads[uncompiled](HeteroscedasticGaussian(), *args)
        chex.assert_tree_all_finite((value, grads))


# -- scores of predictions ---------------------------------------------------------------------------


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_scores_of_gaussian_predictions_are_scipys(noise):
    """Eq. 13 with noise, also where the covariance alone is singular."""
    block = np.diag(np.broadcast_to(noise, D))
    target, mean = normal(3, D), normal(4, D)
    for rank in (D, 1):
        factor = normal(5, D, rank)
        full = factor @ factor.T
        for cov, given in ((full, full), (np.diag(np.diag(full)), np.diagonal(full))):
            exact = scipy.stats.multivariate_normal(mean, cov + block).logpdf(target)
            value, _ = with_grads[score](Gaussian(noise), target, mean, given)
            np.testing.assert_allclose(value, exact, atol=1e-10)


def test_the_score_of_a_class_is_finite_where_its_probability_underflows():
    mean = np.asarray([500.0, -500.0, 0.0, -2000.0], np.float32)
    for cov in (np.zeros(4, np.float32), np.ones((4, 4), np.float32)):
        value, (_, *grads) = with_grads[score](Categorical(), np.asarray(1), mean, cov)
        assert -1100 < value < -900
        chex.assert_tree_all_finite(grads)
        np.testing.assert_allclose(grads[0], [-1.0, 1.0, 0.0, 0.0], atol=1e-5)


# -- Bernoulli likelihoods, against a very fine sum ---------------------------------------------------

LOGITS = np.linspace(-8, 8, 17)
LOGISTIC = {
    jax.jit(partial(expected, jax.nn.softplus)): lambda f: np.logaddexp(0, f),
    jax.jit(partial(expected, jax.nn.sigmoid)): scipy.special.expit,
}


def fine_average(fn, mean, variance):
    z = np.linspace(-12, 12, 4_001)
    weights = np.exp(-(z**2) / 2)
    return fn(mean[..., None] + np.sqrt(variance)[..., None] * z) @ (weights / weights.sum())


@pytest.mark.parametrize("fn", LOGISTIC, ids=["softplus", "sigmoid"])
def test_quadrature_of_the_logistic_function(fn):
    """Its derivatives are in tests/expectations."""
    for variance, error in ((0.0, 1e-14), (1.0, 1e-9), (4.0, 6e-6), (9.0, 3e-4)):
        variance = np.full(17, variance)
        exact = fine_average(LOGISTIC[fn], LOGITS, variance)
        assert np.abs(fn(LOGITS, variance) - exact).max() < error


def test_bernoulli():
    """Its expectation; in compiled code, a target that is no probability gives NaN."""
    target = np.asarray([[1.0, 0.0], [0.25, 1.0]])
    mean, cov = np.asarray([[0.3, -1.0], [2.0, 0.0]]), np.asarray([[0.5, 0.0], [1.0, 2.0]])
    softplus = fine_average(lambda f: np.logaddexp(0, f), mean, cov)
    exact = np.sum(target * mean) - np.sum(softplus)
    np.testing.assert_allclose(value_alone(Bernoulli(), target, mean, cov), exact, rtol=1e-6)
    for wrong in (2.0, -0.5):
        assert np.isnan(value_alone(Bernoulli(), np.where(target == 0.25, wrong, 0), mean, cov))
