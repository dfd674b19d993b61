"""Forecast hourly temperatures with an encoder-decoder Bayesian Transformer, by the analytic ELBO.

72 hours in, 24 hours out, with bands. The data, `seattle-temps` of the package vega_datasets, are NOAA's
hourly climate normals of Seattle for one year, split by time: train, validation, test. What is predicted
is the correction to yesterday's value at the same hour and its noise, from the changes between the three
days; in training half of the windows have the signs of all changes turned (warming is taken for the
mirror image of cooling). Nothing is sampled, neither to train nor to predict. Compared with yesterday's
value and with a ridge regression, all with spreads from the validation part, which also gives the one
factor on the network's standard deviations. Writes metrics.json and a figure, and prints one table.
"""

import argparse
import dataclasses
import datetime
import time
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from matplotlib.axes import Axes

import moment_jax as mj
from experiments.checkpoints import run_folder
from experiments.command_line import Parser
from experiments.figures import BAYES, STYLE, Figure, plt, save
from experiments.outputs import aligned, write_json
from experiments.seq2seq import baselines, data
from experiments.seq2seq import training as forecast_training
from experiments.seq2seq.baselines import LEVELS, Forecast, seasonal_naive
from experiments.seq2seq.data import DAY, START, Parts, Windows, tokens
from experiments.seq2seq.forecaster import bayesian_forecaster
from experiments.training import fit_saved

NETWORK = "Bayesian Transformer"
NUM_SHOWN = 5
HORIZON = np.arange(1, DAY + 1)


def add_arguments(parser: Parser) -> None:
    """The options of the experiment."""
    # The windows overlap: a KL weight of 24 would count each hour once.
    parser.training("runs/seq2seq", steps=600, batch_size=32, kl_weight=4.0)


def run(args: argparse.Namespace) -> None:
    """Fit the baselines, train the network, compare them, and write the results."""
    begin = time.perf_counter()
    parts = data.split(data.load())
    out = run_folder(args)
    each, alpha = _baselines(parts)
    scale = data.day_difference_scale(parts.train)
    network = _train(args, parts, scale)
    trained = time.perf_counter()
    later = parts.validation.followed_by(parts.test)
    forecast = forecast_training.forecast(network, later, scale)
    count = len(parts.validation.origin)
    validation, test = forecast.part(slice(count)), forecast.part(slice(count, None))
    factor = forecast_training.calibration(validation, parts.validation)
    each[NETWORK] = tuple(part._replace(sd=factor * part.sd) for part in (validation, test))
    metrics: dict[str, Any] = {
        "settings": vars(args),
        "scale": scale,
        "alpha": alpha,
        "kl": float(network.kl()),
        "validation": {n: baselines.scores(one[0], parts.validation) for n, one in each.items()},
        "test": {n: baselines.scores(one[1], parts.test) for n, one in each.items()},
        "sd_factor": factor,
        "without_sd_factor": baselines.scores(test, parts.test),
        "seconds": {"training": trained - begin},
    }
    save(
        _figure(parts.test, each[NETWORK][1], _spread_out(parts, NUM_SHOWN)), out / "forecasts.png"
    )
    metrics["seconds"]["total"] = time.perf_counter() - begin
    write_json(out / "metrics.json", metrics)
    _print(out, metrics)


def _spread_out(parts: Parts, count: int) -> np.ndarray:
    return np.linspace(0, len(parts.test.origin) - 1, count).round().astype(int)


Both = tuple[Forecast, ...]
"""Forecasts of the validation part and of the test part."""


def _baselines(parts: Parts) -> tuple[dict[str, Both], float]:
    """Every baseline's forecasts by name, and the ridge's alpha chosen on the validation part."""
    fit = baselines.ridge(parts)
    each: dict[str, Both] = {}
    for name, predict in (("yesterday", baselines.seasonal_naive), ("ridge", fit.predict)):
        validation, test = predict(parts.validation), predict(parts.test)
        each[name] = tuple(
            baselines.with_residual_spread(validation, mean, parts.validation)
            for mean in (validation, test)
        )
    return each, fit.alpha


def _train(args: argparse.Namespace, parts: Parts, scale: float) -> mj.Bayesian:
    train, validation = tokens(parts.train, scale), tokens(parts.validation, scale)
    network = bayesian_forecaster(args.structure, train.target_calendar.shape[-1], args.seed)
    size = min(args.batch_size, len(train.correction))
    options = {"num_steps": args.steps, "batch_size": size, "kl_weight": args.kl_weight}
    task = forecast_training.task(train, validation, **options)
    task = dataclasses.replace(task, settings={"structure": args.structure, **options})
    trained: mj.Bayesian = fit_saved(task, network, args, "", args.seed).model
    return trained


def _figure(part: Windows, forecast: Forecast, shown: np.ndarray) -> Figure:
    """Some windows: what differs from yesterday, with both bands."""
    yesterday = seasonal_naive(part)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(shown), figsize=(2.7 * len(shown), 2.8))
        for axis, i in zip(axes, shown, strict=True):
            start = START + datetime.timedelta(hours=int(part.origin[i]))
            _bands(axis, forecast.mean[i] - yesterday[i], forecast.sd[i])
            axis.plot(HORIZON, part.future[i] - yesterday[i], "k.", ms=4, label="truth")
            axis.axhline(0, color="0.6", lw=0.7)
            axis.set(title=f"{start:%d %b, from %H:%M}", xlabel="hours ahead")
        axes[0].set_ylabel("minus yesterday's (°F)")
        axes[0].legend(fontsize=7)
    return figure


def _bands(axes: Axes, mean: np.ndarray, sd: np.ndarray) -> None:
    for level, shade in zip(LEVELS, (0.45, 0.2), strict=True):
        width = NormalDist().inv_cdf((1 + level) / 2) * sd
        label = f"{100 * level:.0f} % band"
        axes.fill_between(
            HORIZON, mean - width, mean + width, color=BAYES, alpha=shade, lw=0, label=label
        )
    axes.plot(HORIZON, mean, color=BAYES, lw=1, label="forecast")


def _print(out: Path, metrics: dict[str, Any]) -> None:
    rows = [["test part", "NLL", "CRPS (°F)", "RMSE (°F)", "in 50 %", "in 90 %"]]
    for name, found in metrics["test"].items():
        cells = [f"{found['nll']:.3f}", *(f"{found[key]:.4f}" for key in ("crps", "rmse"))]
        shares = [f"{100 * found[key]:.1f} %" for key in ("coverage_50", "coverage_90")]
        rows.append([name, *cells, *shares])
    print(aligned(rows))
    print(
        f"sds times {metrics['sd_factor']:.3f} by the validation part; KL weight "
        f"{metrics['settings']['kl_weight']:g}; {metrics['seconds']['total']:.0f} s in all; in {out}"
    )
