"""The comparison of optimisers at a tiny size, and what its figures are made of."""

import json

import numpy as np
import pytest

from experiments import optimizers
from experiments.__main__ import main
from experiments.optimizers import METHODS, Course, Method


@pytest.mark.slow
def test_the_comparison(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "adam", Method(METHODS["adam"].optimizer, (1e-3,)))
    monkeypatch.setattr(optimizers, "ROUNDS", 1)
    file = tmp_path / "a.json"
    options = ["--task", "autoencoder", "--method", "kfac", "--steps", "3", "--seeds", "1"]
    assert main(["optimizers", *options, "--json", str(file)]) == 0
    (record,) = json.loads(file.read_text())
    assert list(record["methods"]) == ["adam", "kfac"]
    for row in record["methods"].values():
        assert np.isfinite(row["losses"]).all()
        assert row["seconds_per_step"] > 0


def test_steps_to_a_loss():
    course = Course(np.array([3.0, 2.0, 1.0, 1.5]))
    assert course.steps_to(1.0) == 3
    assert course.steps_to(0.5) == np.inf
    assert Course(np.array([1.0, np.nan])).diverged
