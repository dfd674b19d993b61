"""Case files and the figures that are made of them."""

import json

import numpy as np
import pytest

import moment_jax as mj
from experiments import accuracy
from experiments.__main__ import main
from experiments.accuracy import trained
from experiments.accuracy.cases import read_case
from experiments.agreement import Agreement


def mlp_arrays(num_samples=4000):
    """A case of 4 -> 5 -> 3 units; the truth by plain sampling, by NumPy alone."""
    rng = np.random.default_rng(0)
    arrays = {"X": rng.normal(size=(3, 4))}
    for i, (out, width) in enumerate(((5, 4), (3, 5))):
        arrays[f"W{i}"] = rng.normal(size=(out, width)) / width**0.5
        arrays[f"b{i}"] = 0.1 * rng.normal(size=out)
        arrays[f"Ws{i}"] = np.full((out, width), 0.1)
        arrays[f"bs{i}"] = np.full(out, 0.1 * i)  # the first bias is certain
    x = np.broadcast_to(arrays["X"][:2], (num_samples, 2, 4))
    for i in range(2):
        kernel, bias = (
            arrays[mean] + arrays[sd] * rng.normal(size=(num_samples, *arrays[mean].shape))
            for mean, sd in ((f"W{i}", f"Ws{i}"), (f"b{i}", f"bs{i}"))
        )
        x = np.einsum("noi,nbi->nbo", kernel, x) + bias[:, None, :]
        x = np.maximum(x, 0) if i == 0 else x
    arrays["mc_mean"], arrays["mc_std"] = x.mean(axis=0), x.std(axis=0)
    return {name: value.astype(np.float32) for name, value in arrays.items()}


def block_arrays(heads=2, tokens=3, width=4, hidden=6, classes=3):
    """Shapes of a one-block case with a head; its truth is made up."""
    rng = np.random.default_rng(1)
    sizes = {"f1": (hidden, width), "f2": (width, hidden)}
    arrays = {"X": rng.normal(size=(2, tokens, width))}
    for name in ("q", "k", "v", "o", "f1", "f2"):
        out, into = sizes.get(name, (width, width))
        arrays[f"L0_W{name}"] = rng.normal(size=(out, into)) / into**0.5
        arrays[f"L0_b{name}"] = np.zeros(out)
    for name in ("ln1", "ln2"):
        arrays[f"L0_{name}_g"], arrays[f"L0_{name}_b"] = np.ones(width), np.zeros(width)
    for name in [name for name in arrays if name.startswith("L0")]:
        arrays[f"{name}_s"] = np.full(arrays[name].shape, 0.05)
    arrays["head_W"], arrays["head_b"] = rng.normal(size=(classes, width)), np.zeros(classes)
    arrays["mc_mean"], arrays["mc_std"] = arrays["X"], np.ones(arrays["X"].shape)
    arrays["logit_mean"], arrays["logit_std"] = np.zeros((2, classes)), np.ones((2, classes))
    return {name: value.astype(np.float32) for name, value in arrays.items()} | {"heads": heads}


def compare(folder, *structures):
    """The records of one run."""
    file = folder / "figures.json"
    arguments = ["accuracy", "--cases", str(folder), "--json", str(file), "--repeats", "1"]
    assert main([*arguments, "--structure", *structures]) == 0
    return json.loads(file.read_text())


def test_agreement_is_the_textbooks():
    rng = np.random.default_rng(0)
    mean, truth = rng.normal(size=(2, 5, 4))
    sd, true_sd = rng.uniform(1, 2, size=(2, 5, 4))
    ratio = sd / true_sd
    wanted = (
        np.sqrt((((mean - truth) / true_sd) ** 2).mean()),
        ratio.mean(),
        np.abs(ratio - 1).mean(),
        np.corrcoef(sd.ravel(), true_sd.ravel())[0, 1],
    )
    np.testing.assert_allclose(Agreement.of(mean, sd, truth, true_sd), wanted, rtol=1e-12)


def test_an_mlp_against_its_samples(tmp_path):
    np.savez(tmp_path / "small.npz", **mlp_arrays())
    first, second = read_case(tmp_path / "small.npz").model.beliefs["layers"].values()
    assert isinstance(first["bias"], mj.posterior.Point)  # a standard deviation of zero is certain
    assert isinstance(second["bias"], mj.posterior.Factorized)
    assert first["kernel"].shape == (4, 5)
    records = compare(tmp_path, "Diagonal", "Separable")
    assert [record["structure"] for record in records] == ["Diagonal", "Separable"]
    for record in records:
        assert record["mean_error"] < 0.1
        assert abs(record["sd_ratio"] - 1) < 0.1
        assert record["time_ratio"] > 0


@pytest.mark.slow
def test_blocks_with_a_head_have_two_lines_and_full_is_skipped_where_too_large(tmp_path, capsys):
    np.savez(tmp_path / "small.npz", **block_arrays())
    records = compare(tmp_path, "Diagonal", "Full", "--full-limit", "1e-9")
    assert [record["case"] for record in records] == ["small", "small logits", "small"]
    assert "--full-limit" in capsys.readouterr().out


@pytest.mark.slow
def test_networks_that_are_trained_here(tmp_path, monkeypatch):
    small = {"STEPS": 3, "NUM_BLOCKS": 1, "NUM_FEATURES": 8}
    small["NETWORKS"] = {"cold": (0.1, "every token")}
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


def changed(arrays, **changes):
    """The arrays with these values; without those of None."""
    return {name: value for name, value in (arrays | changes).items() if value is not None}


MLP = mlp_arrays()
BAD_FILES = {
    "no archive": (None, "copy it anew"),
    "pickled": (changed(MLP, X=np.array([object()])), "copy it anew"),
    "missing": (changed(MLP, b0=None), "b0 is missing"),
    "no kind": (changed(MLP, W0=None), "neither W0 nor L0_Wq"),
    "shape": (changed(MLP, b0=np.zeros(3)), "b0 has the shape (3,)"),
    "type": (changed(MLP, b0=np.array(["a"] * 5)), "real numbers"),
    "infinite": (changed(MLP, b0=np.full(5, np.inf)), "finite"),
    "negative": (changed(MLP, bs0=np.full(5, -1.0)), "negative standard deviation"),
    "flat truth": (changed(MLP, mc_std=np.zeros((2, 3))), "not positive"),
    "too few": (changed(MLP, X=np.zeros((1, 4))), "mc_mean is of 2 inputs"),
    "heads": (block_arrays(heads=3), "3 heads do not divide"),
}


@pytest.mark.parametrize(("content", "said"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_case_file(content, said, refused, tmp_path):
    cases = tmp_path / "cases"
    cases.mkdir()
    if content is None:
        (cases / "bad.npz").write_text("no archive")
    else:
        np.savez(cases / "bad.npz", **content)
    refused(["accuracy", "--cases", cases, "--json", tmp_path / "a.json"], "bad.npz", said)
    assert [path.name for path in tmp_path.iterdir()] == ["cases"]


def test_a_folder_without_cases(refused, tmp_path):
    refused(["accuracy", "--cases", tmp_path / "none"], "no folder")
    refused(["accuracy", "--cases", tmp_path], "no .npz")
