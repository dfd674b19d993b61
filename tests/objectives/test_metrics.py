"""Metrics beside scikit-learn's and beside their definitions in plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from moment_jax import objectives

# Of each metric of classes: the value of perfect predictions, and of certain ones that are all wrong.
LABELS = {
    "accuracy": (1, 0),
    "brier_score": (0, 2),
    "negative_log_likelihood": (0, -np.log(np.finfo(np.float32).tiny)),
    "expected_calibration_error": (0, 1),
}
MOMENTS = ["gaussian_negative_log_likelihood", "gaussian_crps", "interval_coverage"]
compiled = {name: jax.jit(getattr(objectives, name)) for name in (*LABELS, *MOMENTS)}


@pytest.fixture(scope="module", params=[2, 5])
def predictions(request):
    rng = np.random.default_rng(request.param)
    probabilities = rng.dirichlet(np.full(request.param, 0.5), size=400)
    labels = np.array([rng.choice(request.param, p=row) for row in probabilities])
    return probabilities, labels


def test_scores_by_their_definitions(predictions):
    metrics = pytest.importorskip("sklearn.metrics")
    probabilities, labels = predictions
    truth = np.eye(probabilities.shape[1])[labels]
    expected = {
        "negative_log_likelihood": metrics.log_loss(truth, probabilities),
        "accuracy": metrics.accuracy_score(labels, probabilities.argmax(axis=1)),
        "brier_score": np.mean(np.sum((probabilities - truth) ** 2, axis=1)),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(compiled[name](*predictions), value, atol=1e-10)


@pytest.mark.parametrize("num_bins", [1, 15])
def test_calibration_by_its_definition(predictions, num_bins):
    probabilities, labels = predictions
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
        expected = [inside.sum(), 0, 0]
        if inside.any():
            expected[1:] = confidence[inside].mean(), hits[inside].mean()
        got = curve.num_examples[b], curve.confidence[b], curve.accuracy[b]
        np.testing.assert_allclose(got, expected, atol=1e-12)
        error += inside.mean() * abs(expected[1] - expected[2])
    np.testing.assert_allclose(calibration_error, error, atol=1e-12)


@pytest.mark.parametrize("name", LABELS)
def test_extreme_predictions_in_float32(name):
    probabilities, right = np.eye(3, dtype=np.float32), np.arange(3)
    for labels, expected in zip((right, np.roll(right, 1)), LABELS[name], strict=True):
        value = compiled[name](probabilities, labels)
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(getattr(objectives, name)(probabilities, labels), value)
    if name == "negative_log_likelihood":  # of an impossible label
        assert np.all(np.isfinite(jax.jit(jax.grad(objectives.negative_log_likelihood))(
            probabilities, np.roll(right, 1))))  # fmt: skip


def test_gaussian_scores_against_scipy():
    rng = np.random.default_rng(3)
    mean, variance = rng.normal(size=(50, 2)), rng.uniform(0.5, 2, size=(50, 2))
    targets = mean + np.sqrt(variance) * rng.normal(size=(50, 2))
    law, moments = scipy.stats.norm(mean, np.sqrt(variance)), {"mean": mean, "variance": variance}
    score = compiled["gaussian_negative_log_likelihood"](targets, **moments)
    np.testing.assert_allclose(score, -law.logpdf(targets).mean(), atol=1e-10)
    levels = (0.5, 0.95)
    covered = jax.jit(
        lambda: [objectives.interval_coverage(targets, **moments, level=level) for level in levels]
    )()
    for level, share in zip(levels, covered, strict=True):
        low, high = law.interval(level)
        inside = np.mean((low <= targets) & (targets <= high))
        np.testing.assert_allclose(share, inside, atol=1e-12)


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
    score = compiled["gaussian_crps"](targets, mean=mean, variance=variance)
    np.testing.assert_allclose(score, exact, atol=1e-10)


crps_with_slopes = jax.jit(
    jax.value_and_grad(
        lambda targets, mean, variance: objectives.gaussian_crps(
            targets, mean=mean, variance=variance
        ),
        argnums=(1, 2),
    )
)


def test_crps_is_proper():
    """No other Gaussian has a lower expected score than the one that the targets come from."""
    targets = scipy.stats.norm.ppf((np.arange(2000) + 0.5) / 2000)

    def score(*moments):
        return crps_with_slopes(targets, *(np.full(2000, moment) for moment in moments))

    best, slopes = score(0.0, 1.0)
    np.testing.assert_allclose(np.sum(slopes, axis=1), 0, atol=1e-3)
    others = ((0.2, 1.0), (-0.2, 1.0), (0.0, 1.4), (0.0, 0.7))
    assert best < min(score(*other)[0] for other in others)


def test_crps_of_a_certain_prediction_is_its_error():
    dtype = np.float32
    mean, targets = np.array([0, 1, 2], dtype), np.array([0.5, 3, -1], dtype)
    variance = np.zeros(3, dtype)
    score, slopes = crps_with_slopes(targets, mean, variance)
    assert score.dtype == dtype
    np.testing.assert_allclose(score, np.abs(targets - mean).mean(), rtol=1e-6)
    np.testing.assert_allclose(slopes[0], np.sign(mean - targets) / 3)
    np.testing.assert_array_equal(slopes[1], 0)
    nearly, _ = crps_with_slopes(targets, mean, variance + np.finfo(dtype).tiny)
    np.testing.assert_allclose(nearly, score, rtol=1e-6)


# -- errors: raised where values are known; in compiled code NaN, never a plausible score --------------


@pytest.mark.parametrize("name", [*LABELS, "reliability_curve"])
def test_invalid_predictions(name):
    metric, labels = getattr(objectives, name), np.array([0, 1])
    for probabilities, given, error, match in (
        (np.full((2, 3), 1 / 3), labels + 2, ValueError, "labels from 0 to 2.*Got .*3"),
        (np.ones((4, 3)), np.ones((4, 3), int), ValueError, r"probabilities \(N, C\) and labels"),
        (np.ones((4, 3)), np.ones(4), ValueError, "integer labels"),
        (np.eye(2, dtype=int), labels, TypeError, r"int64. Use .astype\(jnp.float32\)"),
        ([[1.0, 0.0]], labels, TypeError, r"Got list. Use jnp.asarray"),
        (np.ones((0, 2)), labels[:0], ValueError, "at least one example"),
    ):
        with pytest.raises(error, match=match):
            metric(probabilities, given)
    if name in LABELS:
        nan = np.array([[1, 0, 0], [0, 1, 0], [np.nan] * 3], np.float32)
        assert np.isnan(compiled[name](nan, np.array([0, 1, 1])))
        for label in (3, -1):
            assert np.isnan(compiled[name](np.eye(3, dtype=np.float32), np.array([0, label, 1])))


@pytest.mark.parametrize("name", MOMENTS)
def test_invalid_moments(name):
    score, y = getattr(objectives, name), np.ones(3)
    with pytest.raises(TypeError, match="positional"):  # the order of earlier versions
        score(y, y, y)
    for targets, mean, variance, error, match in (
        (y, y, y[:2], ValueError, f"{name}.*of one shape"),
        (y, y.astype(int), y, TypeError, r"int64. Use .astype\(jnp.float32\)"),
        (y, y, -y, ValueError, r"not negative. Got -1"),
        (y[:0], y[:0], y[:0], ValueError, "at least one target"),
    ):
        with pytest.raises(error, match=match):
            score(targets, mean=mean, variance=variance)
    for mean, variance in ((y, [1, -1, 1.0]), ([1, np.nan, 1], y)):
        assert np.isnan(compiled[name](y, mean=np.asarray(mean), variance=np.asarray(variance)))


def test_bad_numbers():
    with pytest.raises(ValueError, match="num_bins >= 1"):
        objectives.reliability_curve(jnp.ones((4, 3)), jnp.zeros(4, int), 0)
    with pytest.raises(ValueError, match="0 < level < 1"):
        objectives.interval_coverage(jnp.ones(3), mean=jnp.ones(3), variance=jnp.ones(3), level=95)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_every_example_in_half_precision_counts(dtype):
    random = np.random.default_rng(0)
    rounded = jnp.asarray(random.dirichlet(np.ones(3), 2000), dtype)
    labels = jnp.asarray(random.integers(3, size=2000))
    fn = objectives.expected_calibration_error
    found, right = fn(rounded, labels), fn(rounded.astype(jnp.float32), labels)
    assert abs(float(found) - float(right)) < 1e-6
    assert objectives.reliability_curve(rounded, labels).num_examples.sum() == 2000
