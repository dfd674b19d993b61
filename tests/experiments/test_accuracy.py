"""Case files and the figures that are made of them."""

import json
from pathlib import Path

import numpy as np
import pytest

import moment_jax as mj
from experiments.__main__ import main
from experiments.cases import read_case
from moment_jax.reference import Agreement
from tests.experiments.case_files import block_arrays, mlp_arrays

SHARED = Path(__file__).parents[3] / "shared" / "cases"


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
    records = compare(tmp_path, tmp_path, "Diagonal", "TokenBlock")
    assert [record["structure"] for record in records] == ["Diagonal", "TokenBlock"]
    for record in records:
        assert record["mean_error"] < 0.1
        assert abs(record["sd_ratio"] - 1) < 0.1
        assert record["time_ratio"] > 0
    assert capsys.readouterr().out.count("small") == 2


def test_blocks_with_a_head_have_two_lines(tmp_path):
    np.savez(tmp_path / "small.npz", **block_arrays())
    records = compare(tmp_path, tmp_path, "TokenCorrelated")
    assert [record["case"] for record in records] == ["small", "small logits"]


def test_frozen_statistics_come_from_the_inputs_without_truth(tmp_path, capsys):
    arrays = mlp_arrays()
    np.savez(tmp_path / "mlp.npz", **arrays)
    frozen, own = compare(tmp_path, tmp_path, "FrozenSeparable", "Separable")
    assert frozen["sd_ratio"] == pytest.approx(own["sd_ratio"], abs=0.05)
    arrays["X"] = arrays["X"][: len(arrays["mc_mean"])]
    np.savez(tmp_path / "mlp.npz", **arrays)
    assert main(["accuracy", "--cases", str(tmp_path), "--structure", "FrozenSeparable"]) == 2
    assert "without truth" in capsys.readouterr().err


def test_full_is_skipped_where_it_is_too_large(tmp_path, capsys):
    np.savez(tmp_path / "small.npz", **block_arrays())
    arguments = ["accuracy", "--cases", str(tmp_path), "--structure", "Full"]
    assert main([*arguments, "--full-limit", "1e-9"]) == 0
    assert "--full-limit" in capsys.readouterr().out


def test_a_standard_deviation_of_zero_is_certain(tmp_path):
    path = tmp_path / "small.npz"
    np.savez(path, **mlp_arrays())
    first, second = read_case(path).layers
    assert isinstance(first.bias, mj.posterior.Point)
    assert isinstance(second.bias, mj.posterior.Factorized)
    assert first.kernel.shape == (4, 5)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no case files beside the checkout")
def test_a_case_file_of_the_shared_folder(tmp_path):
    (tmp_path / "mlp.npz").write_bytes((SHARED / "mlp_rel0.1.npz").read_bytes())
    (record,) = compare(tmp_path, tmp_path, "Diagonal")
    assert record["sd_error"] < 0.06  # what others reach with diagonal covariances
