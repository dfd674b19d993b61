"""The regression command at a tiny size, its files, and what its moments and mixtures owe."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("sklearn")

from experiments import draws, uci
from experiments.__main__ import main
from experiments.uci import methods, networks, sets, training
from experiments.uci.methods import METHODS
from experiments.uci.networks import Perceptron

pytestmark = pytest.mark.usefixtures("settings_of_a_user")


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
    parts = sets.whole(given)
    np.testing.assert_allclose(parts.train.x[..., [0, 2]].mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(parts.train.y.std(axis=1), 1, atol=1e-6)
    assert not parts.train.x[..., 1].any()
    assert not parts.test.x[..., 1].any()
    validation = sets.held_out(given, seed=0)
    assert validation.train.weight.sum() + validation.test.weight.sum() == 2 * 32
    assert validation.train.x.shape == parts.train.x.shape


def test_moments_are_those_of_drawn_networks():
    network = Perceptron(3, 2)
    module = network.build(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 3))
    mean, cov = nnx.jit(network.moments)(module, x)
    given = draws.many(
        network.outputs(module), draws.weights(module.params), jax.random.key(2), x, 4000
    )
    centred = given - given.mean(axis=0)
    sampled = jnp.einsum("kno,knp->nop", centred, centred) / 3999
    error = jnp.sqrt(jnp.einsum("noo->no", cov) / 4000)
    assert jnp.all(jnp.abs(mean - given.mean(axis=0)) < 5 * error)
    scale = jnp.sqrt(jnp.einsum("noo,npp->nop", cov, cov))
    assert jnp.max(jnp.abs(cov - sampled) / scale) < 5 * (2 / 4000) ** 0.5


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


def test_spreads_are_a_share_of_the_kernels_and_none_of_the_biases():
    module = Perceptron(3, 2).build(jax.random.key(0))
    found = draws.beliefs(methods.relative(module, {"spread": jnp.asarray(0.2)}).params)
    for belief in found:
        sd = jnp.sqrt(belief.variance)
        share = 0.2 if sd.ndim == 2 else 0.0
        assert jnp.allclose(sd, share * jnp.abs(belief.mean), rtol=1e-4, atol=1e-6)


def test_gradients_pass_spreads_that_follow_the_means():
    method, network = METHODS["bayesian"], Perceptron(3, 2)
    params = network.start(jax.random.key(0))
    setting = {"spread": jnp.asarray(0.2), "decay": jnp.asarray(1.0)}
    given = setting, jax.random.key(1), (jnp.ones((4, 3)), jnp.ones(4)), 1.0, 4
    gradient = jax.jit(jax.grad(lambda params: method.loss(network, params, *given)))(params)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def test_dropout_keeps_the_mean_and_drops_inputs_whole():
    params = Perceptron(3, 1).build(jax.random.key(0)).params
    keys = jax.random.split(jax.random.key(1), 2000)
    kernels = jax.vmap(lambda key: draws.dropout(params, 0.2)(key)[1].kernel)(keys)
    gone = jnp.all(kernels == 0, axis=2)
    assert jnp.all(gone | jnp.all(kernels != 0, axis=2))
    assert abs(float(gone.mean()) - 0.2) < 5 * (0.16 / gone.size) ** 0.5


def test_a_learned_prior_is_the_best_of_its_kind():
    module = Perceptron(3, 1).build(jax.random.key(0))
    learned, *fixed = (
        methods.kl(module, {"prior_sd": jnp.asarray(sd)}, 1.0) for sd in (0.0, 0.3, 1.0)
    )
    assert learned < min(fixed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": None}, ["has no x"]),
        ({"x": np.full((40, 3), np.nan)}, ["finite", "x"]),
        ({"y": np.zeros(39)}, ["(40, 3)", "(39,)"]),
        ({"train_idx": np.full((2, 32), 40)}, ["row 40"]),
        ({"train_idx": np.zeros((2, 32))}, ["whole numbers"]),
        ({"test_idx": np.zeros((1, 8), int)}, ["--splits"]),
        ({"test_idx": arrays()["train_idx"][:, :8]}, ["trains on what it tests"]),
        ({"y": np.ones(40)}, ["training targets"]),
    ],
)
def test_bad_files_are_told(change, words, tmp_path, capsys):
    content = {key: value for key, value in (arrays() | change).items() if value is not None}
    np.savez(tmp_path / "a.npz", **content)
    command = ["uci", "--data-dir", str(tmp_path), "--splits", "2", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words)
    assert not (tmp_path / "out").exists()


def test_bad_folders_and_names_are_told(tmp_path, capsys):
    assert main(["uci", "--data-dir", str(tmp_path / "none")]) == 2
    assert main(["uci", "--data-dir", str(tmp_path)]) == 2
    (tmp_path / "a.npz").write_text("no zip")
    assert main(["uci", "--data-dir", str(tmp_path), "--set", "b"]) == 2
    assert main(["uci", "--data-dir", str(tmp_path)]) == 2
    assert main(["uci", "--data-dir", str(tmp_path), "--batch-size", "20"]) == 2
    lines = capsys.readouterr().err.splitlines()
    for line, word in zip(
        lines, ["no folder", "no .npz", "take one of a", "read", "16"], strict=True
    ):
        assert word in line


@pytest.mark.slow
def test_the_regression(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(networks, "HIDDEN", 4)
    monkeypatch.setattr(methods, "NUM_DRAWS", 8)
    monkeypatch.setattr(training, "FACTORS", training.FACTORS[::8])
    for name, method in METHODS.items():
        few = dataclasses.replace(method, candidates=method.candidates[:2])
        monkeypatch.setitem(METHODS, name, few)
    np.savez(tmp_path / "a.npz", **arrays())
    command = ["uci", "--data-dir", str(tmp_path), "--splits", "2", "--out", str(tmp_path / "out")]
    assert main([*command, "--steps", "3", "--batch-size", "16"]) == 0
    assert "heteroscedastic: MC dropout" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    for noise in uci.NOISES:
        for record in metrics["sets"]["a"][noise].values():
            assert np.isfinite(record["nll_of_splits"] + record["rmse_of_splits"]).all()
