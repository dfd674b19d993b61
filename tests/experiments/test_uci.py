"""The comparison on tables at a tiny size, and its files."""

import json

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.uci import frames, methods


def arrays(rows=40, count=2):
    """A set with a constant feature, a feature of integers, and integer targets."""
    random = np.random.default_rng(0)
    x = np.stack([random.normal(size=rows), np.full(rows, 3.0), random.integers(5, size=rows)], 1)
    orders = np.stack([random.permutation(rows) for _ in range(count)])
    y = np.round(3 * x[:, 0] + x[:, 2]).astype(int)
    return {"x": x, "y": y, "train_idx": orders[:, :-8], "test_idx": orders[:, -8:]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": None}, ["has no x"]),
        ({"x": np.full((40, 3), np.nan)}, ["finite", "x"]),
        ({"y": np.zeros(39)}, ["(40, 3)", "(39,)"]),
        ({"train_idx": np.full((2, 32), 40)}, ["row 40"]),
        ({"test_idx": np.zeros((1, 8), int)}, ["--splits"]),
        ({"test_idx": arrays()["train_idx"][:, :8]}, ["trains on what it tests"]),
        ({"y": np.ones(40)}, ["training targets"]),
    ],
)
def test_bad_files_are_told(change, words, tmp_path, refused):
    content = {key: value for key, value in (arrays() | change).items() if value is not None}
    np.savez(tmp_path / "a.npz", **content)
    command = ["uci", "--data-dir", tmp_path, "--splits", "2", "--out", tmp_path / "out"]
    refused(command, *words)
    assert not (tmp_path / "out").exists()


def test_bad_folders_and_names_are_told(tmp_path, refused):
    command = ["uci", "--data-dir", tmp_path]
    refused([*command, "--data-dir", tmp_path / "none"], "no folder")
    refused(command, "no .npz")
    (tmp_path / "a.npz").write_text("no zip")
    refused([*command, "--set", "b"], "take one of a")
    refused(command, "read")
    refused(["uci", "--set", "b"], "take one of cars, weather")


def test_a_table_is_encoded_as_its_training_rows_say():
    pytest.importorskip("vega_datasets")
    given = frames.read_frame("cars", 2)
    train, test = frames.rows(given.x, given.train[0], given.test[0])
    assert (len(train), len(test)) == (358, 40)
    assert train.shape[1] == test.shape[1] == 6 + 3 + 1  # numbers, origins, a lost horsepower
    lost = given.x["Horsepower"].isna().to_numpy()[given.train[0]]
    column = given.x["Horsepower"].to_numpy()[given.train[0]]
    assert np.isfinite(train).all()
    assert np.median(column[~lost]) in train[lost]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "HIDDEN", 4)
    monkeypatch.setattr(methods, "NUM_DRAWS", 8)
    np.savez(tmp_path / "a.npz", **arrays())
    command = ["uci", "--data-dir", tmp_path, "--out", tmp_path / "out", "--splits", "2"]
    command += ["--steps", "20", "--dropout-steps", "3"]
    assert main([*map(str, command)]) == 0
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())["sets"]
    assert list(found["a"]) == [name for name, _ in methods.METHODS.values()]
    for name, record in found["a"].items():
        assert np.isfinite(record["rmse_of_splits"]).all()
        assert (None in record["nll_of_splits"]) == (name == "boosted quantiles")
        assert (record["inside"]["mean"] is None) == name.startswith("MC dropout")
