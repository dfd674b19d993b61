"""The parts of `scale`, and what they say of failures."""

import json

import numpy as np
import pytest

from experiments import scale
from experiments.__main__ import main
from experiments.command_line import PartError
from experiments.scale import devices, tpu


@pytest.mark.slow
def test_many_devices_and_processes_are_one():
    assert main(["scale", "--part", "devices", "--structure", "Diagonal"]) == 0


@pytest.mark.slow
def test_kills_change_nothing(capsys):
    assert main(["scale", "--part", "kills"]) == 0
    assert "is an undisturbed run's bit for bit" in capsys.readouterr().out


@pytest.mark.slow
def test_an_exported_function_is_saved_and_loaded(tmp_path):
    file = tmp_path / "scale.json"
    command = ["scale", "--part", "export", "--out", str(tmp_path), "--json", str(file)]
    assert main(command) == 0
    record = json.loads(file.read_text())["export"]
    assert record["platforms"] == ["cpu", "cuda", "tpu"]
    assert (tmp_path / "predictive.jax").stat().st_size == record["bytes"]


def test_without_a_package(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "scale.json"
    assert main(["scale", "--part", "tpu", "--json", str(file)]) == 0
    assert json.loads(file.read_text()) == {"tpu": {"skipped": "libtpu is not installed"}}
    assert main(["scale", "--part", "export"]) == 1
    assert "needs the package flatbuffers" in capsys.readouterr().err


def test_a_process_that_fails_says_why():
    with pytest.raises(PartError, match="ZeroDivisionError: "):
        scale.fresh(["-c", "1 / 0"])
    with pytest.raises(PartError, match="no result"):
        scale.fresh(["-c", "import time; time.sleep(60)"], timeout=0.01)


def test_a_difference_is_a_fault(monkeypatch, capsys):
    results = {"1x1": {"gradient 0": np.array([0, 2.0])}, "2x2": {"gradient 0": np.array([0.1, 2])}}
    monkeypatch.setattr(devices, "compute", lambda *_, **__: dict(results))
    assert main(["scale", "--part", "devices", "--structure", "Diagonal"]) == 1
    said = capsys.readouterr().err
    assert "Diagonal on 2x2: gradient differs from one device's by 5.0e-02" in said
