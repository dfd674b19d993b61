"""The comparison of optimisers at a tiny size, and what its figures are made of."""

import json

import numpy as np
import pytest

pytest.importorskip("sklearn")

from experiments.__main__ import main
from experiments.optimizers import runs
from experiments.optimizers.runs import LAST_UPDATES, METHODS, Course, Method, Training
from experiments.optimizers.tasks import TASKS

pytestmark = pytest.mark.usefixtures("settings_of_a_user")


@pytest.mark.slow
def test_the_comparison(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "adam", Method(METHODS["adam"].optimizer, (1e-3,)))
    monkeypatch.setattr(runs, "ROUNDS", 1)
    file = tmp_path / "a.json"
    options = ["--task", "autoencoder", "--method", "kfac", "--steps", "3", "--seeds", "1"]
    assert main(["optimizers", *options, "--json", str(file)]) == 0
    assert "autoencoder: to a loss of 0.25" in capsys.readouterr().out
    (record,) = json.loads(file.read_text())
    assert list(record["methods"]) == ["adam", "kfac"]
    for row in record["methods"].values():
        assert np.isfinite(row["losses"]).all()
        assert row["seconds_per_step"] > 0


def test_steps_to_a_loss():
    course = Course(np.array([3.0, 2.0, 1.0, 1.5]))
    assert course.steps_to(1.0) == 3
    assert course.steps_to(0.5) == np.inf
    assert not course.diverged
    assert Course(np.array([1.0, np.nan])).diverged
    losses = np.ones(2 * LAST_UPDATES)
    losses[-3:] = 7.0
    assert Course(losses).last_loss == 1.0  # no single update decides


def test_how_often_the_loss_is_evaluated_changes_nothing():
    training = Training(TASKS["autoencoder"](), METHODS["adam"], 5)
    settings = {"learning_rate": 1e-3}
    (each,) = training.courses(settings, [0])
    (some,) = training.courses(settings, [0], evaluate_every=2)
    assert some.losses[1] == some.losses[2]
    np.testing.assert_allclose(some.losses[[1, 3, 4]], each.losses[[1, 3, 4]], rtol=1e-6)
