"""Forecasts: the split, the tokens, and the whole at a tiny size."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from experiments.__main__ import main
from experiments.seq2seq import data, forecaster
from experiments.seq2seq.data import DAY, FUTURE, PAST, Series
from experiments.seq2seq.forecaster import Forecaster


def year(days=60):
    """A daily wave on a slow one, with noise."""
    hour = np.arange(days * DAY)
    noise = np.random.default_rng(0).normal(size=hour.size)
    slow = 10 * np.sin(2 * np.pi * hour / (days * DAY))
    return Series(hour, 50 + slow + 5 * np.sin(2 * np.pi * hour / DAY) + 0.2 * noise)


@pytest.fixture
def tiny(monkeypatch):
    for name, value in {"WIDTH": 4, "NUM_HEADS": 2, "HIDDEN_FEATURES": 4}.items():
        monkeypatch.setattr(forecaster, name, value)


def test_no_hour_is_in_two_parts():
    series = year()
    parts = data.split(series)
    hours = [part.origin[:, None] + np.arange(-PAST, FUTURE) for part in parts]
    train, validation, test = (set(each.ravel().tolist()) for each in hours)
    assert max(train) < min(validation) <= max(validation) < min(test)
    assert train | validation | test == set(series.hour.tolist())  # and none is wasted
    for part, own in zip(parts, hours, strict=True):
        assert own.min() % DAY == 0
        both = np.concatenate([part.past, part.future], axis=1)
        np.testing.assert_array_equal(both, series[1][own])


def test_a_network_sees_nothing_of_what_it_forecasts():
    part = data.windows(year(10), 0, 10 * DAY)
    known, other = (
        data.tokens(each, 1.0)[:3] for each in (part, part._replace(future=0 * part.future))
    )
    for left, right in zip(known, other, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.usefixtures("tiny")
def test_moments_of_certain_weights_are_those_of_the_plain_network():
    given = data.tokens(data.split(year()).train.part(np.arange(6) * 7), 0.5)
    network = Forecaster("Diagonal", 7, nnx.Rngs(0))
    state = nnx.state(network, mj.nn.VariationalScale)
    nnx.update(network, jax.tree.map(lambda raw: jnp.full_like(raw, -30.0), state))
    moments = nnx.jit(lambda model: model(*given[:3]))
    without, _ = moments(network)
    network.linear.kernel.mean.set_value(0.1 * jnp.ones((2 * DAY, DAY)))
    mean, cov = moments(network)
    np.testing.assert_allclose(mean, network.mean_network()(*given[:3]), atol=2e-5)
    np.testing.assert_allclose(cov, 0, atol=1e-8)
    straight = np.broadcast_to(0.1 * given.changes.sum((1, 2))[:, None], (6, DAY))
    np.testing.assert_allclose(mean[..., 0] - without[..., 0], straight, atol=1e-5)
    np.testing.assert_array_equal(mean[..., 1], without[..., 1])


class Shallow(mj.nn.Dense):
    """In the place of the Transformer, whose gradient takes most of a minute to compile."""

    def __init__(self, num_features, num_heads, num_blocks, *, rngs, structure, **options):
        kept = {name: options[name] for name in ("relative_scale", "prior_scale", "learn_prior")}
        super().__init__(num_features, num_features, rngs=rngs, structure=structure, **kept)

    def network(self, params):
        layer = super().network(params)
        return lambda source, target: layer(target)

    def __call__(self, source, target, source_cov, target_cov):
        return super().__call__(target, target_cov)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_the_whole_with_a_shallow_network(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(mj.nn, "Transformer", Shallow)
    monkeypatch.setattr(data, "load", year)
    command = ["seq2seq", "--steps", "2", "--batch-size", "4", "--structure", "Diagonal"]
    command += ["--out", str(tmp_path)]
    assert main(command) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert list(metrics["test"]) == ["yesterday", "ridge", "Bayesian Transformer"]
    assert all(np.isfinite(list(found.values())).all() for found in metrics["test"].values())
    assert metrics["validation"]["Bayesian Transformer"]["nll"] < 10
    assert (tmp_path / "forecasts.png").stat().st_size > 10_000
    refused([*command, "--resume", "--seed", "1"], "made with seed 0, not 1")


def test_a_missing_package_is_named_with_its_mend(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(["seq2seq", "--out", tmp_path], "moment_jax[forecast]")
    assert not list(tmp_path.iterdir())
