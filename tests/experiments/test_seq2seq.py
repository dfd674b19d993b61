"""Forecasts: the split, the tokens, the baselines by their formulas, and the whole at a tiny size."""

import importlib.machinery
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")

import moment_jax as mj
from experiments.__main__ import main
from experiments.command_line import InputError
from experiments.seq2seq import baselines, data, forecaster, training
from experiments.seq2seq.baselines import Forecast
from experiments.seq2seq.data import DAY, FUTURE, PAST, Series
from experiments.seq2seq.forecaster import Forecaster

NAMES = ("yesterday", "ridge", "Bayesian Transformer")


pytestmark = pytest.mark.usefixtures("settings_of_a_user")


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


def small_tokens(series=None, count=6):
    part = data.split(series or year()).train
    return data.tokens(part.part(np.arange(count) * 7), 0.5)


def hours_of(part):
    return set((part.origin[:, None] + np.arange(-PAST, FUTURE)).ravel().tolist())


def test_no_hour_is_in_two_parts():
    series = year()
    parts = data.split(series)
    train, validation, test = (hours_of(part) for part in parts)
    assert max(train) < min(validation) <= max(validation) < min(test)
    assert train | validation | test == set(series.hour.tolist())  # and none is wasted
    for part in parts:
        assert min(hours_of(part)) % DAY == 0
    at = dict(zip(*series, strict=True))
    for part in parts:
        for i in (0, len(part.origin) - 1):
            hours = part.origin[i] + np.arange(-PAST, FUTURE)
            both = np.concatenate([part.past[i], part.future[i]])
            np.testing.assert_array_equal(both, [at[hour] for hour in hours])


def test_a_network_sees_nothing_of_what_it_forecasts():
    part = data.windows(year(10), 0, 10 * DAY)
    known, other = (
        data.tokens(each, 1.0)[:3] for each in (part, part._replace(future=0 * part.future))
    )
    for left, right in zip(known, other, strict=True):
        np.testing.assert_array_equal(left, right)


def test_mini_batches_and_mirrors():
    given = small_tokens()
    key = jax.random.key(0)
    batches = [data.mini_batch(key, jnp.int32(step), given, 2) for step in range(3)]
    seen = np.concatenate([batch.correction for batch in batches])
    np.testing.assert_allclose(np.sort(seen[:, 0]), np.sort(given.correction[:, 0]))
    mirrored = data.mirrored(key, given)
    sign = np.sign(mirrored.correction[:, 0] / given.correction[:, 0])
    assert set(sign.tolist()) == {-1, 1}
    np.testing.assert_allclose(mirrored.correction, sign[:, None] * given.correction)
    np.testing.assert_allclose(mirrored.changes, sign[:, None, None] * given.changes)
    np.testing.assert_array_equal(mirrored.target_calendar, given.target_calendar)


def test_ridge_by_its_normal_equations(monkeypatch):
    parts = data.split(year())
    best = baselines.ridge(parts)
    error = np.sqrt(np.mean((parts.validation.future - best.predict(parts.validation)) ** 2))
    np.testing.assert_allclose(best.validation_error, error)  # which it is chosen by
    monkeypatch.setattr(baselines, "ALPHAS", (3.0,))
    found = baselines.ridge(parts).predict(parts.test)
    x, new = (baselines.change_regressors(part) for part in (parts.train, parts.test))
    y, offset = parts.train.future - parts.train.past[:, -DAY:], parts.test.past[:, -DAY:]
    scale = x.std()
    x, new = x / scale, new / scale
    weights = np.linalg.solve(x.T @ x + 3 * np.eye(x.shape[1]), x.T @ y)
    np.testing.assert_allclose(found, offset + new @ weights, atol=1e-7)


def test_calibration_makes_the_root_mean_square_one():
    part = data.split(year()).validation
    forecast = Forecast(part.future + 0.3, np.full(part.future.shape, 0.1))
    factor = training.calibration(forecast, part)
    np.testing.assert_allclose(factor, 3)
    again = forecast._replace(sd=factor * forecast.sd)
    np.testing.assert_allclose(training.calibration(again, part), 1)
    found = baselines.scores(again, part)
    np.testing.assert_allclose(found["rmse"], 0.3, rtol=1e-4)
    assert (found["coverage_50"], found["coverage_90"]) == (0, 1)


@pytest.mark.usefixtures("tiny")
def test_moments_of_certain_weights_are_those_of_the_plain_network():
    given = small_tokens()
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
def test_the_whole_with_a_shallow_network(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mj.nn, "Transformer", Shallow)
    monkeypatch.setattr(data, "load", year)
    arguments = ["seq2seq", "--steps", "2", "--batch-size", "4", "--structure", "Diagonal"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in NAMES)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert set(metrics["test"]) == set(metrics["validation"]) == set(NAMES)
    for found in metrics["test"].values():
        assert np.all(np.isfinite(list(found.values())))
    assert metrics["settings"]["steps"] == 2
    assert metrics["validation"]["Bayesian Transformer"]["nll"] < 10
    assert (tmp_path / "forecasts.png").stat().st_size > 10_000
    assert main([*arguments, "--out", str(tmp_path), "--resume", "--seed", "1"]) == 2
    assert "made with seed 0, not 1" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_mend(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["seq2seq", "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "moment_jax[forecast]" in line
    assert not (tmp_path / "out").exists()


def test_a_package_without_the_file(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("vega_datasets", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(InputError, match=r"no seattle-temps\.csv"):
        data.load()
