"""The comparison of classifiers at a tiny size, its images, and its scores."""

import json

import jax
import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from experiments import classify, draws, predictions
from experiments.__main__ import main
from experiments.classify import compared, images, scores
from experiments.classify.images import Task
from experiments.classify.methods import relative
from experiments.classify.networks import Network
from experiments.data import Images
from experiments.outputs import summary
from moment_jax.inference import prior_precision

pytestmark = pytest.mark.usefixtures("settings_of_a_user")


def test_every_seed_divides_the_images_its_own_way_and_others_are_on_the_same_scale():
    task = images.load("digits", (0, 3))
    assert [part.labels.shape for part in task[:3]] == [(2, 1037), (2, 260), (2, 500)]
    assert not np.array_equal(task.test.labels[0], task.test.labels[1])
    alone = images.load("digits", [3])
    np.testing.assert_array_equal(alone.test.images[0], task.test.images[1])
    together = np.concatenate([part.images[0] for part in task[:3]]).reshape(1797, -1)
    assert len(np.unique(together.round(4), axis=0)) == 1797
    for given in images.others(task, 50).values():
        assert given.shape == (2, 50, 8, 8)
        assert (given >= task.background[:, None, None, None] - 1e-5).all()
        assert np.ptp(given) > 1


def test_images_are_turned_to_the_left():
    task = images.load("digits", [0])
    some = task.test.images[:, :5]
    np.testing.assert_allclose(images.turned(some, 0, task.background), some, atol=1e-5)
    ones = np.zeros((1, 1, 8, 8), np.float32)
    ones[..., 1, 4] = 1  # above the centre; turned left it is at the left
    assert images.turned(ones, 90, np.zeros(1))[..., 3:5, :3].sum() > 0.5


def test_doubt_tells_others():
    sure, unsure = np.eye(4)[[0, 1, 2]], np.full((3, 4), 0.25)
    assert scores.detection(sure, unsure) == {"auroc": 1.0, "aupr": 1.0}
    assert scores.detection(unsure, sure)["auroc"] == 0
    assert summary([1.0, 3.0]) == {"mean": 2.0, "error": 1.0}


def test_the_temperature_is_found_that_probabilities_were_made_with():
    random = np.random.default_rng(0)
    truth = random.dirichlet(np.full(4, 0.5), size=20_000)
    labels = np.asarray([random.choice(4, p=p) for p in truth])
    for temperature in (0.5, 1.0, 2.0):
        given = scores.tempered(truth, 1 / temperature)
        assert abs(scores.best_temperature(given, labels) / temperature - 1) < 0.03
        np.testing.assert_allclose(scores.tempered(given, temperature), truth, atol=1e-9)


def test_spreads_are_those_of_the_noise_that_was_trained_with():
    network = Network(8, 4)
    params = relative(network.start(jax.random.key(0)), 0.1)
    beliefs = network.module(params).params
    draw = jax.jit(jax.vmap(draws.relative(beliefs, 0.1)))
    drawn = draw(jax.random.split(jax.random.key(1), 500))
    for belief, arrays in zip(draws.beliefs(beliefs), jax.tree.leaves(drawn), strict=True):
        np.testing.assert_allclose(belief.variance, (0.1 * belief.mean) ** 2, rtol=1e-3)
        error = np.abs(arrays.mean(axis=0) - belief.mean)
        assert np.all(error <= 6 * 0.1 * np.abs(belief.mean) / 500**0.5 + 1e-6)


def test_the_floor_of_the_calibration_error_is_what_labels_from_the_predictions_give():
    random = np.random.default_rng(0)
    given = random.dirichlet(np.full(4, 0.3), size=300)
    found = [
        predictions.scores(given, np.asarray([random.choice(4, p=p) for p in given]))["ece"]
        for _ in range(60)
    ]
    error = np.std(found) / 60**0.5
    assert abs(scores.calibrated_ece(given) - np.mean(found)) < 4 * error
    assert scores.calibrated_ece(np.eye(4)) == 0


@pytest.mark.slow
def test_the_comparison(tmp_path, capsys, monkeypatch):
    whole = images.load("digits", (0, 1))
    few = [Images(part.images[:, :60], part.labels[:, :60]) for part in whole[:3]]
    monkeypatch.setattr(images, "load", lambda *_: Task(*few, whole.background, 4))
    small = Network(8, 4, structure="Diagonal")
    monkeypatch.setattr(Network, "of", classmethod(lambda cls, task: small))
    monkeypatch.setattr(images, "ANGLES", (0, 45, 60))
    monkeypatch.setattr(compared, "RATES", (0.1,))
    monkeypatch.setattr(compared, "LAPLACE", {"last_layer": "last-layer Laplace"})
    monkeypatch.setattr(prior_precision, "PRECISIONS", (100.0,))
    monkeypatch.setattr(classify, "SHIFTED", 50)
    counts = ["--seeds", 2, "--members", 2, "--plain-steps", 3, "--steps", 2, "--samples", 2]
    assert main(["classify", "--out", str(tmp_path), *map(str, counts)]) == 0
    assert "2 Bayesian, analytic" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(metrics["methods"]) == 9
    for record in metrics["methods"].values():
        assert np.isfinite([found["mean"] for found in record["test"].values()]).all()
        assert 0 <= record["others"]["letters"]["auroc"]["mean"] <= 1
        assert 1 / 4 <= record["chosen"]["temperature"] <= 4
        assert np.isfinite(record["calibrated_ece"]["mean"])
        difference = record["minus_plain"]["test"]["nll"]["mean"]
        expected = (
            record["test"]["nll"]["mean"] - metrics["methods"]["plain"]["test"]["nll"]["mean"]
        )
        assert abs(difference - expected) < 1e-9
    for name in ("shifts.png", "others.png"):
        assert (tmp_path / name).stat().st_size > 10_000
