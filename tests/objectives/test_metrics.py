"""Metrics beside scikit-learn's and beside their definitions in plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from moment_jax import objectives

negative_log_likelihood = jax.jit(objectives.negative_log_likelihood)
accuracy = jax.jit(objectives.accuracy)
brier_score = jax.jit(objectives.brier_score)
gaussian_negative_log_likelihood = jax.jit(objectives.gaussian_negative_log_likelihood)
expected_calibration_error = jax.jit(objectives.expected_calibration_error, static_argnums=2)
reliability_curve = jax.jit(objectives.reliability_curve, static_argnums=2)
gaussian_crps = jax.jit(objectives.gaussian_crps)
interval_coverage = jax.jit(objectives.interval_coverage, static_argnames="level")


@pytest.fixture(scope="module", params=[2, 5])
def predictions(request):
    rng = np.random.default_rng(request.param)
    probabilities = rng.dirichlet(np.full(request.param, 0.5), size=400)
    labels = np.array([rng.choice(request.param, p=row) for row in probabilities])
    return probabilities, labels


def test_against_scikit_learn(predictions):
    metrics = pytest.importorskip("sklearn.metrics")
    probabilities, labels = predictions
    classes = list(range(probabilities.shape[1]))
    np.testing.assert_allclose(
        negative_log_likelihood(probabilities, labels),
        metrics.log_loss(labels, probabilities, labels=classes),
        atol=1e-10,
    )
    hits = metrics.accuracy_score(labels, probabilities.argmax(axis=1))
    np.testing.assert_allclose(accuracy(probabilities, labels), hits, atol=1e-12)


def test_brier_score_by_its_definition(predictions):
    probabilities, labels = predictions
    truth = np.eye(probabilities.shape[1])[labels]
    expected = np.mean(np.sum((probabilities - truth) ** 2, axis=1))
    np.testing.assert_allclose(brier_score(*predictions), expected, atol=1e-10)


@pytest.mark.parametrize("num_bins", [1, 15])
def test_calibration_by_its_definition(predictions, num_bins):
    probabilities, labels = map(np.asarray, predictions)
    confidence, hits = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    curve, calibration_error = jax.jit(
        lambda *predictions: (
            objectives.reliability_curve(*predictions, num_bins),
            objectives.expected_calibration_error(*predictions, num_bins),
        )
    )(*predictions)
    error = 0.0
    for b in range(num_bins):
        inside = (confidence > b / num_bins) & (confidence <= (b + 1) / num_bins)
        assert curve.num_examples[b] == inside.sum()
        if inside.any():
            np.testing.assert_allclose(curve.confidence[b], confidence[inside].mean(), atol=1e-12)
            np.testing.assert_allclose(curve.accuracy[b], hits[inside].mean(), atol=1e-12)
            error += inside.mean() * abs(confidence[inside].mean() - hits[inside].mean())
        else:
            assert curve.confidence[b] == curve.accuracy[b] == 0
    np.testing.assert_allclose(calibration_error, error, atol=1e-12)


def test_extreme_predictions():
    probabilities, labels = np.eye(3, dtype=np.float32), np.asarray([0, 1, 2])
    for metric, perfect in (
        (negative_log_likelihood, 0),
        (accuracy, 1),
        (brier_score, 0),
        (expected_calibration_error, 0),
    ):
        assert metric(probabilities, labels) == perfect
        assert np.isfinite(metric(probabilities, labels[::-1]))
    np.testing.assert_allclose(brier_score(probabilities, np.roll(labels, 1)), 2)
    np.testing.assert_allclose(expected_calibration_error(probabilities, np.roll(labels, 1)), 1)


def test_gaussian_scores_against_scipy():
    rng = np.random.default_rng(3)
    mean, variance = rng.normal(size=(50, 2)), rng.uniform(0.5, 2, size=(50, 2))
    targets = mean + np.sqrt(variance) * rng.normal(size=(50, 2))
    moments = {"mean": mean, "variance": variance}
    exact = -scipy.stats.norm(mean, np.sqrt(variance)).logpdf(targets).mean()
    np.testing.assert_allclose(
        gaussian_negative_log_likelihood(targets, **moments), exact, atol=1e-10
    )
    for level in (0.5, 0.95):
        low, high = scipy.stats.norm(mean, np.sqrt(variance)).interval(level)
        inside = np.mean((low <= targets) & (targets <= high))
        covered = interval_coverage(targets, **moments, level=level)
        np.testing.assert_allclose(covered, inside, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    ["negative_log_likelihood", "accuracy", "brier_score", "expected_calibration_error"],
)
def test_jit_and_float32(name):
    probabilities, labels = np.asarray([[0.7, 0.3], [0.4, 0.6]], np.float32), np.asarray([0, 0])
    value = globals()[name](probabilities, labels)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(getattr(objectives, name)(probabilities, labels), value, rtol=1e-6)


def test_gradient_of_an_impossible_label_is_finite():
    grad = jax.jit(jax.grad(objectives.negative_log_likelihood))(np.eye(2), np.asarray([1, 0]))
    assert np.all(np.isfinite(grad))


@pytest.mark.parametrize(
    "metric",
    [
        negative_log_likelihood,
        accuracy,
        brier_score,
        expected_calibration_error,
        reliability_curve,
    ],
)
def test_bad_classes(metric):
    with pytest.raises(ValueError, match=r"probabilities \(N, C\) and labels \(N,\)"):
        metric(np.ones((4, 3)), np.ones((4, 3), int))
    with pytest.raises(ValueError, match="integer labels"):
        metric(np.ones((4, 3)), np.ones(4))


def test_bad_numbers():
    with pytest.raises(ValueError, match="num_bins >= 1"):
        reliability_curve(jnp.ones((4, 3)), jnp.zeros(4, int), 0)
    with pytest.raises(ValueError, match="0 < level < 1"):
        interval_coverage(jnp.ones(3), mean=jnp.ones(3), variance=jnp.ones(3), level=95)


LABELS = ["accuracy", "brier_score", "negative_log_likelihood", "expected_calibration_error"]
SCORES = ["gaussian_negative_log_likelihood", "gaussian_crps", "interval_coverage"]


@pytest.mark.parametrize("label", [3, -1])
@pytest.mark.parametrize("name", LABELS)
def test_labels_out_of_range(name, label):
    """An error if they are known, NaN if not: never a plausible score."""
    probabilities, labels = np.full((4, 3), 1 / 3, np.float32), np.array([0, label, 1, 2])
    with pytest.raises(ValueError, match=f"labels from 0 to 2.*Got .*{label}"):
        getattr(objectives, name)(probabilities, labels)
    assert np.isnan(globals()[name](probabilities, labels))


@pytest.mark.parametrize("name", LABELS)
def test_invalid_predictions(name):
    metric, labels = getattr(objectives, name), np.array([0, 1])
    assert np.isnan(jax.jit(metric)(np.array([[1, 0], [np.nan, np.nan]]), labels))
    with pytest.raises(TypeError, match=r"int64. Use .astype\(jnp.float32\)"):
        metric(np.eye(2, dtype=int), labels)
    with pytest.raises(TypeError, match=r"Got list. Use jnp.asarray"):
        metric([[1.0, 0.0]], labels)
    with pytest.raises(ValueError, match="at least one example"):
        metric(np.ones((0, 2)), labels[:0])


@pytest.mark.parametrize("name", SCORES)
def test_invalid_moments(name):
    score, y = getattr(objectives, name), np.ones(3)
    with pytest.raises(ValueError, match=f"{name}.*of one shape"):
        score(y, mean=y, variance=y[:2])
    with pytest.raises(TypeError, match="positional"):  # the order of earlier versions
        score(y, y, y)
    with pytest.raises(TypeError, match=r"int64. Use .astype\(jnp.float32\)"):
        score(y, mean=y.astype(int), variance=y)
    with pytest.raises(ValueError, match=r"not negative. Got -1"):
        score(y, mean=y, variance=-y)
    with pytest.raises(ValueError, match="at least one target"):
        score(y[:0], mean=y[:0], variance=y[:0])
    compiled = jax.jit(score)
    assert np.isnan(compiled(y, mean=y, variance=np.array([1, -1, 1.0])))
    assert np.isnan(compiled(y, mean=np.array([1, np.nan, 1]), variance=y))


def test_crps_is_the_integral_of_its_definition():
    rng = np.random.default_rng(4)
    mean, variance = rng.normal(size=6), rng.uniform(0.2, 3, size=6)
    targets = mean + 2 * np.sqrt(variance) * rng.normal(size=6)

    def by_definition(m, v, y):
        law, options = scipy.stats.norm(m, v**0.5), {"epsabs": 1e-13, "epsrel": 1e-13}
        below, _ = scipy.integrate.quad(lambda x: law.cdf(x) ** 2, m - 12 * v**0.5, y, **options)
        above, _ = scipy.integrate.quad(lambda x: law.sf(x) ** 2, y, m + 12 * v**0.5, **options)
        return below + above

    exact = np.mean([by_definition(*one) for one in zip(mean, variance, targets, strict=True)])
    np.testing.assert_allclose(
        gaussian_crps(targets, mean=mean, variance=variance), exact, atol=1e-10
    )


def test_crps_is_proper():
    """No other Gaussian has a lower expected score than the one that the targets come from."""
    targets = scipy.stats.norm.ppf((np.arange(2000) + 0.5) / 2000)

    def score(moments):
        mean, variance = (jnp.full(targets.shape, moment) for moment in moments)
        return objectives.gaussian_crps(targets, mean=mean, variance=variance)

    with_slope = jax.jit(jax.value_and_grad(score))
    best, slope = with_slope(np.array([0.0, 1.0]))
    np.testing.assert_allclose(slope, 0, atol=1e-3)
    assert best < min(
        with_slope(np.array(other))[0]
        for other in ((0.2, 1.0), (-0.2, 1.0), (0.0, 1.4), (0.0, 0.7))
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_crps_of_a_certain_prediction_is_its_error(dtype):
    mean, targets = np.array([0, 1, 2], dtype), np.array([0.5, 3, -1], dtype)
    variance = np.zeros(3, dtype)
    score = gaussian_crps(targets, mean=mean, variance=variance)
    assert score.dtype == dtype
    np.testing.assert_allclose(score, np.abs(targets - mean).mean(), rtol=1e-6)
    nearly = gaussian_crps(targets, mean=mean, variance=variance + np.finfo(dtype).tiny)
    np.testing.assert_allclose(nearly, score, rtol=1e-6)

    def by_moments(mean, variance):
        return objectives.gaussian_crps(targets, mean=mean, variance=variance)

    slopes = jax.jit(jax.grad(by_moments, argnums=(0, 1)))(mean, variance)
    np.testing.assert_allclose(slopes[0], np.sign(mean - targets) / 3)
    np.testing.assert_array_equal(slopes[1], 0)
