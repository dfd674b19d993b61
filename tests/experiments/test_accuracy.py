"""Case files and the figures that are made of them."""

import json

import numpy as np
import pytest

import moment_jax as mj
from experiments import accuracy
from experiments.__main__ import main
from experiments.accuracy import trained
from experiments.accuracy.cases import read_case
from moment_jax.reference import Agreement
from tests.experiments.case_files import block_arrays, mlp_arrays


def compare(cases, folder, *structures):
    """The records of one run."""
    file = folder / "figures.json"
    arguments = ["accuracy", "--cases", str(cases), "--json", str(file), "--repeats", "1"]
    assert main([*arguments, "--structure", *structures]) == 0
    return json.loads(file.read_text())


pytestmark = pytest.mark.usefixtures("settings_of_a_user")


def test_agreement_is_the_textbooks():
    rng = np.random.default_rng(0)
    mean, truth = rng.normal(size=(2, 5, 4))
    sd, true_sd = rng.uniform(1, 2, size=(2, 5, 4))
    figures = Agreement.of(mean, sd, truth, true_sd)
    ratio = sd / true_sd
    wanted = (
        np.sqrt((((mean - truth) / true_sd) ** 2).mean()),
        ratio.mean(),
        np.abs(ratio - 1).mean(),
        np.corrcoef(sd.ravel(), true_sd.ravel())[0, 1],
    )
    np.testing.assert_allclose(figures, wanted, rtol=1e-12)


def test_an_mlp_against_its_samples(tmp_path, capsys):
    np.savez(tmp_path / "small.npz", **mlp_arrays())
    records = compare(tmp_path, tmp_path, "Diagonal", "Separable")
    assert [record["structure"] for record in records] == ["Diagonal", "Separable"]
    for record in records:
        assert record["mean_error"] < 0.1
        assert abs(record["sd_ratio"] - 1) < 0.1
        assert record["time_ratio"] > 0
    assert capsys.readouterr().out.count("small") == 2


def test_blocks_with_a_head_have_two_lines_and_full_is_skipped_where_it_is_too_large(
    tmp_path, capsys
):
    np.savez(tmp_path / "small.npz", **block_arrays())
    records = compare(tmp_path, tmp_path, "Diagonal", "Full", "--full-limit", "1e-9")
    assert [record["case"] for record in records] == ["small", "small logits", "small"]
    assert "--full-limit" in capsys.readouterr().out


def test_a_standard_deviation_of_zero_is_certain(tmp_path):
    path = tmp_path / "small.npz"
    np.savez(path, **mlp_arrays())
    first, second = read_case(path).layers
    assert isinstance(first.bias, mj.posterior.Point)
    assert isinstance(second.bias, mj.posterior.Factorized)
    assert first.kernel.shape == (4, 5)


@pytest.mark.slow
def test_networks_that_are_trained_here(tmp_path, monkeypatch):
    small = {"STEPS": 3, "NUM_BLOCKS": 1, "NUM_FEATURES": 8, "NETWORKS": {"cold": 0.1}}
    for name, value in small.items():
        monkeypatch.setattr(trained, name, value)
    monkeypatch.setattr(accuracy, "SAMPLED", (10, 200))
    file = tmp_path / "figures.json"
    command = ["accuracy", "--structure", "Diagonal", "--samples", "2000", "--repeats", "1"]
    assert main([*command, "--json", str(file)]) == 0
    records = {(r["case"], r["structure"]): r for r in json.loads(file.read_text())}
    assert len(records) == 8
    errors = [records["cold logits", f"{count} sampled"]["sd_error"] for count in (10, 200)]
    assert errors[1] < errors[0]
    assert records["cold logits", "linearised"]["sd_ratio"] == pytest.approx(1, abs=0.2)
    assert all(record["time_ratio"] > 0 for record in records.values())
