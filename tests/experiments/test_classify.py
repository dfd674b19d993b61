"""The comparison of classifiers at a tiny size, its images, and its scores."""

import json

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from experiments import classify
from experiments.__main__ import main
from experiments.classify import compared, images, scores
from experiments.classify.images import Task
from experiments.data import Images
from moment_jax.inference import held_out

pytestmark = pytest.mark.usefixtures("settings_of_a_user")


def test_parts_are_disjoint_and_others_are_on_the_same_scale():
    task = images.load("digits")
    assert [len(part.labels) for part in task[:3]] == [1037, 260, 500]
    assert len(task.rest.labels) == 1297
    for given in images.others(task).values():
        assert given.shape == task.test.images.shape
        assert given.min() >= task.background - 1e-5
        assert np.ptp(given) > 1


def test_shifts_of_no_strength_change_nothing():
    task = images.load("digits")
    some = task.test.images[:5]
    np.testing.assert_allclose(images.turned(some, 0, task.background), some, atol=1e-5)
    np.testing.assert_allclose(images.blurred(some, 0.0), some, atol=1e-5)
    ones = np.zeros((1, 8, 8), np.float32)
    ones[0, 1, 4] = 1  # above the centre; turned left it is at the left
    assert images.turned(ones, 90, 0.0)[0, 3:5, :3].sum() > 0.5


def test_doubt_tells_others_and_wrong_answers():
    sure, unsure = np.eye(4)[[0, 1, 2]], np.full((3, 4), 0.25)
    assert scores.detection(sure, unsure) == {"auroc": 1.0, "aupr": 1.0}
    assert scores.detection(unsure, sure)["auroc"] == 0
    given = np.asarray([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]])
    np.testing.assert_allclose(scores.risk_by_coverage(given, np.array([0, 0, 0])), [0, 0, 1 / 3])
    found = scores.summary([1.0, 3.0])
    assert found == {"mean": 2.0, "error": 1.0}


def test_data_sets_have_names(capsys):
    assert main(["classify", "--data", "letters"]) == 2
    assert "take one of digits, mnist5k" in capsys.readouterr().err


@pytest.mark.whole_run
def test_the_comparison(tmp_path, capsys, monkeypatch):
    whole = images.load("digits")

    def small(name, division):
        parts = [Images(p.images[:60], p.labels[:60]) for p in whole[:3]]
        return Task(*parts, whole.background, 4, parts[0])

    monkeypatch.setattr(images, "load", small)
    monkeypatch.setattr(compared, "RATES", (0.1,))
    monkeypatch.setattr(compared, "LAPLACE", {"last_layer": "last-layer Laplace"})
    monkeypatch.setattr(held_out, "PRECISIONS", (100.0,))
    monkeypatch.setattr(classify, "SHIFTED", 50)
    counts = ["--seeds", 2, "--members", 2, "--plain-steps", 3, "--steps", 2, "--samples", 2]
    command = ["classify", "--out", str(tmp_path), "--structure", "Diagonal", *map(str, counts)]
    assert main(command) == 0
    assert "last-layer Laplace" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(metrics["methods"]) >= 6
    for record in metrics["methods"].values():
        assert np.isfinite([found["mean"] for found in record["test"].values()]).all()
        assert 0 <= record["others"]["letters"]["auroc"]["mean"] <= 1
    for name in ("shifts.png", "rejection.png", "others.png"):
        assert (tmp_path / name).stat().st_size > 10_000
