"""Metrics beside scikit-learn's and beside their definitions in plain numpy; the ELBO."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from moment_jax import objectives
from moment_jax.objectives import Gaussian, elbo, expected_log_likelihood, kl_warmup

# Of each metric: the value of perfect predictions, and of certain ones that are all wrong.
METRICS = {
    "accuracy": (1, 0),
    "negative_log_likelihood": (0, -np.log(np.finfo(np.float32).tiny)),
    "expected_calibration_error": (0, 1),
}
compiled = {
    "accuracy": jax.jit(objectives.accuracy),
    "negative_log_likelihood": jax.jit(objectives.negative_log_likelihood),
    "expected_calibration_error": jax.jit(
        objectives.expected_calibration_error, static_argnames="num_bins"
    ),
}


def predictions(num_classes, size=400):
    rng = np.random.default_rng(num_classes)
    probabilities = rng.dirichlet(np.full(num_classes, 0.5), size=size)
    return probabilities, np.array([rng.choice(num_classes, p=row) for row in probabilities])


@pytest.mark.parametrize("num_classes", [2, 5])
def test_metrics_by_their_definitions(num_classes):
    metrics = pytest.importorskip("sklearn.metrics")
    probabilities, labels = given = predictions(num_classes)
    confidence, hits = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    for name, value in (
        ("negative_log_likelihood", metrics.log_loss(np.eye(num_classes)[labels], probabilities)),
        ("accuracy", metrics.accuracy_score(labels, probabilities.argmax(axis=1))),
    ):
        np.testing.assert_allclose(compiled[name](*given), value, atol=1e-10)
    for num_bins in (1, 15):
        error = 0.0
        for b in range(num_bins):
            inside = (confidence > b / num_bins) & (confidence <= (b + 1) / num_bins)
            if inside.any():
                error += inside.mean() * abs(confidence[inside].mean() - hits[inside].mean())
        found = compiled["expected_calibration_error"](*given, num_bins=num_bins)
        np.testing.assert_allclose(found, error, atol=1e-12)


@pytest.mark.parametrize("name", METRICS)
def test_extreme_predictions_in_float32(name):
    probabilities, right = np.eye(3, dtype=np.float32), np.arange(3)
    for labels, expected in zip((right, np.roll(right, 1)), METRICS[name], strict=True):
        value = compiled[name](probabilities, labels)
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    if name == "negative_log_likelihood":  # of an impossible label
        assert np.all(np.isfinite(jax.jit(jax.grad(objectives.negative_log_likelihood))(
            probabilities, np.roll(right, 1))))  # fmt: skip


@pytest.mark.parametrize("name", METRICS)
def test_invalid_predictions(name):
    """Raised where values are known; in compiled code NaN, never a plausible score."""
    metric, labels = getattr(objectives, name), np.array([0, 1])
    for probabilities, given, error, match in (
        (np.full((2, 3), 1 / 3), labels + 2, ValueError, "classes from 0 to 2.*Got .*3"),
        (np.ones((4, 3)), np.ones((4, 3), int), ValueError, r"shape \(4,\). Got \(4, 3\).*one-hot"),
        (np.ones((4, 3)), np.ones(4), ValueError, "integer class"),
        (np.eye(2, dtype=int), labels, TypeError, r"int64. Use .astype\(jnp.float32\)"),
        ([[1.0, 0.0]], labels, TypeError, r"Got list. Use jnp.asarray"),
        (np.ones((4, 2, 3)), np.ones((4, 2), int), ValueError, r"probabilities \(N, C\)"),
        (np.ones((0, 2)), labels[:0], ValueError, "at least one example"),
    ):
        with pytest.raises(error, match=match):
            metric(probabilities, given)
    nan = np.array([[1, 0, 0], [0, 1, 0], [np.nan] * 3], np.float32)
    assert np.isnan(compiled[name](nan, np.array([0, 1, 1])))
    for label in (3, -1):
        assert np.isnan(compiled[name](np.eye(3, dtype=np.float32), np.array([0, label, 1])))
    if name == "expected_calibration_error":
        with pytest.raises(ValueError, match="num_bins >= 1"):
            metric(jnp.ones((4, 3)), jnp.zeros(4, int), 0)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_every_example_in_half_precision_counts(dtype):
    probabilities, labels = predictions(3, 2000)
    rounded, fn = jnp.asarray(probabilities, dtype), compiled["expected_calibration_error"]
    found, right = fn(rounded, labels), fn(rounded.astype(jnp.float32), labels)
    assert abs(float(found) - float(right)) < 1e-6


# -- the ELBO -----------------------------------------------------------------------------------------


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
