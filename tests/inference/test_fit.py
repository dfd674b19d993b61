"""The front door: predictions in the data's units, noise that does not collapse, loud errors."""

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
NOISE = RNG.normal(size=(120, 1))


pytestmark = pytest.mark.usefixtures("ranks_of_a_user")


def linear():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    model.kernel.set_value(np.array([[1.0], [-1.0], [0.0]], np.float32))
    return model


def test_a_table_in_its_own_units():
    y = 1000 * (X[:, :1] - X[:, 1:2] + 0.3 * NOISE) + 5000
    fitted = mj.fit(None, (X, y), GAUSSIAN, num_hidden=8, max_steps=600)
    mean, sd = fitted.predict(X)
    assert mean.shape == sd.shape == (120, 1)
    assert np.mean(np.abs(mean - y)) < 300
    assert 0.25 < np.sqrt(fitted.noise_variance[0]) / 1000 < 0.4
    assert (sd > np.sqrt(fitted.noise_variance)).all()
    density = -0.5 * (np.log(2 * np.pi * sd**2) + ((y - mean) / sd) ** 2)
    assert np.allclose(fitted.log_prob(X, y), density[:, 0], atol=1e-3)


def test_classes_of_a_table():
    labels = (X[:, 0] > 0).astype(int) + (X[:, 1] > 1)
    fitted = mj.fit(None, (X, labels), CATEGORICAL, num_hidden=8, max_steps=250, learning_rate=0.03)
    probabilities = fitted.predict_proba(X)
    assert probabilities.shape == (120, 3)
    assert np.allclose(probabilities.sum(1), 1, atol=1e-5)
    own = np.log(probabilities[np.arange(120), labels])
    assert np.allclose(fitted.log_prob(X, labels), own, atol=0.02)
    assert own.mean() > -0.4
    with pytest.raises(TypeError, match="Use `predict_proba`"):
        fitted.predict(X)


def test_a_model_of_ones_own_is_trained_and_not_changed():
    model = MyMLP(nnx.Rngs(0))
    model.eval()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    held = X[100:], np.sin(X[100:, :2])
    fitted = mj.fit(
        model, (X[:100], np.sin(X[:100, :2])), GAUSSIAN, validation=held, max_steps=200,
        learning_rate=2e-2, structure=mj.Diagonal, progress=False,
    )  # fmt: skip
    assert min(nll for _, _, nll in fitted.history) < fitted.history[0][2]
    mean, _ = jax.jit(mj.bayesian(fitted.model, fitted.posterior, structure=mj.Diagonal))(
        X[:4].astype(np.float32)
    )
    assert np.allclose(mean, fitted.predict(X[:4])[0], atol=1e-5)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, after))


def test_the_noise_of_a_cold_posterior_does_not_collapse():
    x = RNG.normal(size=(80, 20))
    y, test = x[:, 0] + RNG.normal(size=80), RNG.normal(size=(200, 20))
    fitted = mj.fit(
        None, (x, y), GAUSSIAN, kl_weight=1e-4, patience=60, max_steps=400, learning_rate=0.05,
        refit=False,
    )  # fmt: skip
    truth = test[:, 0] + RNG.normal(size=200)
    assert -fitted.log_prob(test, truth).mean() < 2.5
    assert fitted.noise_variance[0] > 0.3


def test_known_noise_stays():
    fitted = mj.fit(linear(), (X, X[:, :1]), GAUSSIAN(0.5), max_steps=50)
    assert np.allclose(fitted.noise_variance, 0.5)


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
        ({"validation": 1.5}, ValueError, "a share from 0"),
        ({"data": (X[:, :, None], np.ones(120))}, ValueError, r"one table \(N, D\)"),
        ({"model": np.tanh}, TypeError, "NNX module, or None"),
    ],
)
def test_bad_input(change, error, words):
    arguments = {"model": None, "data": (X, X[:, 0]), "likelihood": GAUSSIAN}
    with pytest.raises(error, match=words):
        mj.fit(**{**arguments, **change})
