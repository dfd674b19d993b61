"""Forecasts: the split, the tokens, and the whole at a tiny size."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.stats import norm

import moment_jax as mj
from experiments import seq2seq
from experiments.__main__ import main
from experiments.seq2seq import data, network
from experiments.seq2seq.data import DAY, FUTURE, PAST, Series


def year(days=60):
    """A daily wave on a slow one, with noise."""
    hour = np.arange(days * DAY)
    noise = np.random.default_rng(0).normal(size=hour.size)
    slow = 10 * np.sin(2 * np.pi * hour / (days * DAY))
    return Series(hour, 50 + slow + 5 * np.sin(2 * np.pi * hour / DAY) + 0.2 * noise)


@pytest.fixture
def tiny(monkeypatch):
    for name, value in {"WIDTH": 4, "NUM_HEADS": 2, "HIDDEN_FEATURES": 4}.items():
        monkeypatch.setattr(network, name, value)


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
    parts = part, part._replace(future=0 * part.future)
    known, other = (data.tokens(each, 1.0)[:3] for each in parts)
    for left, right in zip(known, other, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_changes_go_straight_to_the_means_and_add_their_own_variance():
    few = data.Windows(*(array[:42:7] for array in data.split(year()).train))
    given = data.tokens(few, 0.5)[:3]
    model = network.bayesian_forecaster("Diagonal", 7, 0)
    moments = nnx.jit(lambda model: model(*given))
    without, kernel = moments(model), model.weights["linear"]["kernel"]
    kernel.mean.set_value(0.1 * jnp.ones((2 * DAY, DAY)))
    found = moments(model)
    straight = np.broadcast_to(0.1 * given[0].sum((1, 2))[:, None], (6, DAY))
    np.testing.assert_allclose(found.mean[..., 0] - without.mean[..., 0], straight, atol=1e-5)
    np.testing.assert_array_equal(found.mean[..., 1], without.mean[..., 1])
    kernel.raw["scale"].set_value(jnp.full((2 * DAY, DAY), jnp.log(jnp.expm1(0.2))))
    wider = moments(model).variance - found.variance
    squares = (given[0] ** 2).sum((1, 2))[:, None] * (0.2**2 - 0.005**2)
    np.testing.assert_allclose(wider[..., 0], np.broadcast_to(squares, (6, DAY)), rtol=1e-3)
    np.testing.assert_allclose(wider[..., 1], 0, atol=1e-6)


class Shallow(nnx.Linear):
    """In the place of the Transformer, whose gradient takes most of a minute to compile."""

    def __init__(self, num_features, num_heads, num_blocks, *, rngs, **options):
        super().__init__(num_features, num_features, rngs=rngs)

    def __call__(self, source, target):
        return super().__call__(target)


def test_scores_of_forecasts_by_their_definitions():
    rng = np.random.default_rng(0)
    mean, sd, truth = rng.normal(size=5), rng.uniform(0.5, 2, 5), 2 * rng.normal(size=5)
    law, x = norm(mean, sd), np.linspace(-20, 20, 200_001)[:, None]
    crps = np.sum((law.cdf(x) - (x >= truth)) ** 2, axis=0) * (x[1] - x[0])
    low, high = law.interval(0.9)
    found = seq2seq.scores(law, truth)
    expected = -law.logpdf(truth).mean(), crps.mean(), np.mean((low <= truth) & (truth <= high))
    found = [found[k] for k in ("nll", "crps", "coverage_90")]
    np.testing.assert_allclose(found, expected, atol=1e-3)


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
    monkeypatch.setitem(sys.modules, "pandas", None)
    refused(["seq2seq", "--out", tmp_path], "pandas", "moment_jax[experiments]")
    assert not list(tmp_path.iterdir())
