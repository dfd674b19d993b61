"""`fit`: predictions, early stopping, learned and known noise, loud errors."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.propagation.models import MyMLP

GAUSSIAN, CATEGORICAL = mj.objectives.Gaussian, mj.objectives.Categorical
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 3))
LABELS = (X[:, 0] > 0).astype(int)
NOISE = RNG.normal(size=(120, 1))


pytestmark = pytest.mark.usefixtures("ranks_of_a_user")


def linear(outputs=1):
    return nnx.Linear(3, outputs, rngs=nnx.Rngs(0))


def test_noise_is_learned_and_in_every_prediction():
    y = X[:, :1] - X[:, 1:2] + 0.3 * NOISE
    fitted = mj.fit(linear(), (X, y), GAUSSIAN, learning_rate=0.02, max_steps=600)
    mean, sd = fitted.predict(X)
    assert mean.shape == sd.shape == (120, 1)
    assert np.mean(np.abs(mean - y)) < 0.3
    assert 0.25 < np.sqrt(fitted.noise_variance[0]) < 0.4
    assert (sd > np.sqrt(fitted.noise_variance)).all()
    density = -0.5 * (np.log(2 * np.pi * sd**2) + ((y - mean) / sd) ** 2)
    assert np.allclose(fitted.log_prob(X, y), density[:, 0], atol=1e-3)


def test_classes():
    labels = (X[:, 0] > 0).astype(int) + (X[:, 1] > 1)
    fitted = mj.fit(linear(3), (X, labels), CATEGORICAL, max_steps=250, learning_rate=0.03)
    probabilities = fitted.predict_proba(X)
    assert probabilities.shape == (120, 3)
    assert np.allclose(probabilities.sum(1), 1, atol=1e-5)
    own = np.log(probabilities[np.arange(120), labels])
    assert np.allclose(fitted.log_prob(X, labels), own, atol=0.02)
    assert own.mean() > -0.5
    with pytest.raises(TypeError, match="Use `predict_proba`"):
        fitted.predict(X)


def test_the_model_is_trained_to_the_best_point_and_not_changed():
    model = MyMLP(nnx.Rngs(0))
    model.eval()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    held = X[100:], np.sin(X[100:, :2])
    fitted = mj.fit(
        model, (X[:100], np.sin(X[:100, :2])), GAUSSIAN, validation=held, max_steps=300,
        learning_rate=2e-2, patience=1, structure=mj.Diagonal, progress=False,
    )  # fmt: skip
    scores = [nll for _, _, nll in fitted.history]
    assert min(scores) < scores[0]
    assert abs(-fitted.log_prob(*held).mean() - min(scores)) < 1.1e-3
    mean, _ = jax.jit(mj.bayesian(fitted.model, fitted.posterior, structure=mj.Diagonal))(
        X[:4].astype(np.float32)
    )
    assert np.allclose(mean, fitted.predict(X[:4])[0], atol=1e-5)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, after))


def test_known_noise_stays():
    fitted = mj.fit(linear(), (X, X[:, :1]), GAUSSIAN(0.5), max_steps=50)
    assert np.allclose(fitted.noise_variance, 0.5)


class Standardised(nnx.Module):
    """Would take inputs of one column, or bytes that wrap around, without a word."""

    def __init__(self):
        self.linear = linear(3)

    def __call__(self, x):
        return self.linear((x + x) / np.full(3, 2.0, np.float32))


@pytest.fixture(scope="module")
def classifier():
    """The last class is seen in validation alone."""
    held = X[:20], np.arange(20) % 3
    options = {"validation": held, "max_steps": 70, "structure": mj.Diagonal}
    with jax.numpy_rank_promotion("allow"):
        return mj.fit(Standardised(), (X, LABELS), CATEGORICAL, **options)


def test_a_class_in_validation_alone_and_inputs_of_other_types(classifier):
    assert np.isfinite([row[1:] for row in classifier.history]).all()
    assert [row[0] for row in classifier.history] == [50, 70]
    whole = np.round(X).clip(-1, 1)
    expected = classifier.predict_proba(whole)
    for same in (whole.astype(int), whole.astype(np.int8), whole.tolist(), whole.astype("f4")):
        np.testing.assert_array_equal(classifier.predict_proba(same), expected)
    many = classifier.predict_proba(np.full((1, 3), 200, np.uint8))  # 200 + 200 is no byte
    np.testing.assert_array_equal(many, classifier.predict_proba(np.full((1, 3), 200.0)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: f.predict_proba(X[:, :1]), r"of shape \(3,\). Got \(1,\).*mj.bayesian"),
        (lambda f: f.predict_proba((X, X)), r"of shape \(3,\). Got \(3,\), \(3,\)"),
        (lambda f: f.predict_proba(X[:0]), r"one example or more of each input. Got \[0\]"),
        (lambda f: f.predict_proba(np.nan * X), "finite inputs"),
        (lambda f: f.log_prob(X[:, :1], LABELS), "of shape"),
        (lambda f: f.log_prob(X[:5], LABELS[:3]), r"as many inputs as targets, .*Got \[5, 3\]"),
        (lambda f: f.log_prob(X[:5], np.full(5, 3)), "labels from 0 to 2.*Got 3"),
    ],
)
def test_predictions_need_the_inputs_of_the_training(classifier, call, words):
    with pytest.raises(ValueError, match=words):
        call(classifier)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"likelihood": "mse"}, TypeError, "Categorical or Gaussian.*Got 'mse'"),
        ({"likelihood": GAUSSIAN(-1.0)}, ValueError, "positive noise variance"),
        ({"data": (X, np.ones(3))}, ValueError, "as many inputs as targets"),
        ({"data": X}, TypeError, "inputs, targets"),
        ({"data": (X, np.full(120, np.nan))}, ValueError, "finite targets"),
        ({"data": (X * np.inf, np.ones(120))}, ValueError, "finite inputs"),
        ({"likelihood": CATEGORICAL}, ValueError, r"\(N,\) of integers"),
        ({"data": (X, LABELS[:, None]), "likelihood": CATEGORICAL}, ValueError, r"labels\[:, 0\]"),
        ({"data": (X, np.eye(3)[LABELS]), "likelihood": CATEGORICAL}, ValueError, "argmax"),
        ({"data": (X, LABELS), "likelihood": CATEGORICAL}, ValueError, "labels from 0 to 0.*Got 1"),
        ({"data": (X, X)}, ValueError, "as many targets as the model has outputs, 1. Got 3"),
        ({"data": (X.astype(str), X)}, TypeError, "inputs of numbers"),
        ({"data": (X, 1e300 * X[:, 0])}, ValueError, "finite targets, in single precision"),
        ({"data": (2**40 + np.arange(120), X[:, 0])}, ValueError, "integers of 32 bits"),
        ({"validation": 1.5}, ValueError, "a share from 0"),
        ({"validation": [X, X]}, TypeError, "inputs, targets"),
        ({"validation": (X[:, :1], X[:, 0])}, ValueError, r"of shape \(3,\). Got \(1,\)"),
        ({"validation": (X, X)}, ValueError, "outputs, 1. Got 3"),
        ({"max_steps": 0}, ValueError, "max_steps >= 1. Got 0"),
        ({"patience": 0}, ValueError, "patience >= 1"),
        ({"learning_rate": -0.1}, ValueError, "learning_rate > 0. Got -0.1"),
        ({"kl_weight": -1.0}, ValueError, "kl_weight >= 0"),
        ({"relative_scale": 0.0}, ValueError, "relative_scale > 0. Got 0"),
        ({"learning_rate": 1e30, "max_steps": 50}, ValueError, "diverged.*learning_rate below"),
        ({"likelihood": GAUSSIAN(np.nan)}, ValueError, "positive noise variance"),
        ({"data": (X[:, :, None].swapaxes(1, 2), X[:, 0])}, ValueError, r"outputs \(N, D\)"),
        ({"model": np.tanh}, TypeError, "NNX module"),
        ({"model": nnx.Dropout(0.1)}, ValueError, "a model with parameters. Got Dropout"),
        ({"data": (X[:0], X[:0])}, ValueError, r"at least one. Got \[0, 0\]"),
        ({"model": None}, TypeError, "NNX module. Got NoneType"),
    ],
)
def test_bad_input(change, error, words):
    arguments = {"model": linear(), "data": (X, X[:, 0]), "likelihood": GAUSSIAN}
    with pytest.raises(error, match=words):
        mj.fit(**{**arguments, **change})
