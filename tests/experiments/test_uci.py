"""The regression command at a tiny size, its files, and what its moments and mixtures owe."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import uci
from experiments.__main__ import main
from experiments.uci import methods, sets, training
from experiments.uci.methods import METHODS


def arrays(rows=40, count=2):
    """A set with a constant feature, a feature of integers, and integer targets."""
    random = np.random.default_rng(0)
    x = np.stack([random.normal(size=rows), np.full(rows, 3.0), random.integers(5, size=rows)], 1)
    orders = np.stack([random.permutation(rows) for _ in range(count)])
    y = np.round(3 * x[:, 0] + x[:, 2]).astype(int)
    return {"x": x, "y": y, "train_idx": orders[:, :-8], "test_idx": orders[:, -8:]}


def test_parts_are_standardised_by_the_training_rows_and_constants_vanish(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    given = sets.read_set(tmp_path / "a.npz", 2)
    train, test = sets.whole(given)[:2]
    np.testing.assert_allclose(train.x[..., [0, 2]].mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(train.y.std(axis=1), 1, atol=1e-6)
    assert not train.x[..., 1].any()
    assert not test.x[..., 1].any()
    validation = sets.held_out(given, seed=0)
    assert validation.train.weight.sum() + validation.test.weight.sum() == 2 * 32


def test_a_random_noise_variance_is_integrated_over():
    mean, cov = jnp.asarray([[0.3, -1.0]]), jnp.asarray([[[0.5, 0.2], [0.2, 0.4]]])
    analytic = methods.of_moments(mean, cov, jnp.ones(()))
    given = jax.random.multivariate_normal(jax.random.key(0), mean[0], cov[0], (20_000,))
    sampled = methods.of_draws(given[:, None], jnp.ones(()))
    for y in (-1.0, 0.5, 3.0):
        density = jnp.exp(methods.log_likelihood(given, jnp.asarray(y), jnp.zeros(())))
        exact = float(analytic.log_density(jnp.asarray([y]))[0])
        spread = density.std() / density.mean() / 20_000**0.5
        assert abs(exact - float(sampled.log_density(jnp.asarray([y]))[0])) < 5 * spread
    np.testing.assert_allclose(analytic.centre(), 0.3, rtol=1e-5)


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
    refused([*command, "--batch-size", "20"], "16")


@pytest.mark.slow
def test_the_regression(tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "HIDDEN", 4)
    monkeypatch.setattr(methods, "NUM_DRAWS", 8)
    monkeypatch.setattr(training, "FACTORS", training.FACTORS[::8])
    for name, method in METHODS.items():
        few = dataclasses.replace(method, candidates=method.candidates[:2])
        monkeypatch.setitem(METHODS, name, few)
    np.savez(tmp_path / "a.npz", **arrays())
    command = ["uci", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*command, "--splits", "2", "--steps", "3", "--batch-size", "16"]) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    for noise in uci.NOISES:
        assert list(metrics["sets"]["a"][noise]) == [method.name for method in METHODS.values()]
        for record in metrics["sets"]["a"][noise].values():
            assert np.isfinite(record["nll_of_splits"] + record["rmse_of_splits"]).all()
