"""The comparison of optimisers at a tiny size, and what its figures are made of."""

import json

import numpy as np
import pytest

from experiments import optimizers
from experiments.__main__ import main
from experiments.optimizers import EVERY, Course


@pytest.mark.slow
def test_the_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "RATES", (1e-3, np.nan))
    monkeypatch.setattr(optimizers, "ROUNDS", 1)
    options = ["--task", "strips", "--method", "kfac", "--steps", "20", "--seeds", "1"]
    assert main(["optimizers", *options, "--out", str(tmp_path)]) == 0
    (record,) = json.loads((tmp_path / "metrics.json").read_text())
    assert list(record["methods"]) == ["adamw", "kfac"]
    assert record["methods"]["adamw"]["rate"] == 1e-3  # not the one that gives NaN
    for row in record["methods"].values():
        assert np.isfinite([row["train"], row["held_out"]]).all()
        assert row["seconds_per_step"] > 0
    assert (tmp_path / "losses.png").stat().st_size > 0


def test_steps_to_a_loss():
    course = Course(np.array([3.0, 2.0, 1.0, 1.5]), np.zeros(4))
    assert course.steps_to(1.5) == 1.5 * EVERY
    assert course.steps_to(3.0) == 0
    assert course.steps_to(0.5) == np.inf
