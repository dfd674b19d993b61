"""Forecast hourly temperatures with an encoder-decoder Bayesian Transformer, by the analytic ELBO.

72 hours in, 24 hours out, with bands. The data, `seattle-temps` of the package vega_datasets, are NOAA's
hourly climate normals of Seattle for one year, split by time: train, validation, test. What is predicted
is the correction to yesterday's value at the same hour and its noise, from the changes between the three
days; in training half of the windows have the signs of all changes turned (warming is taken for the
mirror image of cooling). Nothing is sampled, neither to train nor to predict. Compared with yesterday's
value and with two ridge regressions, all with spreads from the validation part, which also gives the one
factor on the network's standard deviations. Writes metrics.json and a figure, and prints one table.
"""

import argparse
import datetime
import time
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax
import numpy as np
from flax import nnx

import moment_jax as mj
from experiments import report
from experiments.checkpoints import run_folder
from experiments.command_line import Parser
from experiments.figures import BAYES, STYLE, Axes, Figure, plt, save
from experiments.outputs import write_json
from experiments.seq2seq import baselines
from experiments.seq2seq import training as forecast_training
from experiments.seq2seq.baselines import LEVELS, Forecast, seasonal_naive
from experiments.seq2seq.data import (
    DAY,
    PAST,
    START,
    Parts,
    Windows,
    day_difference_scale,
    load,
    split,
    tokens,
)
from experiments.seq2seq.forecaster import Forecaster, Size
from experiments.training import fit_saved

NETWORK = "Bayesian Transformer"
NUM_SHOWN = 5
HORIZON = np.arange(1, DAY + 1)
SAVE_EVERY = 250  # updates
NUM_SAMPLED = 60  # test windows that the analytic moments are judged on by sampling


def add_arguments(parser: Parser) -> None:
    """The options of the experiment."""
    parser.out("runs/seq2seq")
    parser.resume()
    parser.seed("random seed of weights, batches and samples; never of the split")
    parser.choice(
        "--structure", mj.STRUCTURES, "Diagonal", "covariance structure (Diagonal is the fastest)"
    )
    parser.whole("--steps", 600, "updates")
    parser.whole("--batch-size", 32, "training windows for each update")
    parser.real(
        "--kl-weight",
        4.0,
        "final weight of the KL divergence against all windows; they overlap, so 24 would count "
        "each hour once",
        least=0,
    )
    parser.whole(
        "--samples",
        200,
        "networks sampled from the posterior to judge the analytic moments by",
        least=2,
    )


def run(args: argparse.Namespace) -> None:
    """Fit the baselines, train the network, compare them, and write the results."""
    begin = time.perf_counter()
    parts = split(load())
    out = run_folder(args)
    each, choices = _baselines(parts)
    scale = day_difference_scale(parts.train)
    network = _train(args, parts, scale)
    trained = time.perf_counter()
    later = parts.validation.followed_by(parts.test)
    forecast, parameter_sd = forecast_training.forecast(network, later, scale)
    count = len(parts.validation.origin)
    validation, test = forecast.part(slice(count)), forecast.part(slice(count, None))
    factor = forecast_training.calibration(validation, parts.validation)
    each[NETWORK] = tuple(forecast_training.calibrated(part, factor) for part in (validation, test))
    metrics: dict[str, Any] = {
        "settings": vars(args),
        "parts": _described(parts),
        "scale": scale,
        "baselines": choices,
        "kl": float(network.kl()),
        "validation": _scores(each, parts, 0),
        "test": _scores(each, parts, 1),
        "sd_factor": factor,
        "without_sd_factor": baselines.scores(test, parts.test),
        "sampled": _sampled(args, network, parts, scale, (test, parameter_sd[count:])),
        "seconds": {"training": trained - begin},
    }
    shown = np.linspace(0, len(parts.test.origin) - 1, NUM_SHOWN).round().astype(int)
    save(_figure(parts.test, each[NETWORK][1], shown), out / "forecasts.png")
    metrics["seconds"]["total"] = time.perf_counter() - begin
    write_json(out / "metrics.json", metrics)
    _print(out, metrics)


Both = tuple[Forecast, ...]
"""Forecasts of the validation part and of the test part."""


def _baselines(parts: Parts) -> tuple[dict[str, Both], dict[str, Any]]:
    """Every baseline's forecasts by name, and the alphas chosen on the validation part."""
    fits = {
        "ridge": baselines.ridge(parts),
        "ridge on changes": baselines.ridge(parts, on_changes=True),
    }
    means = {"yesterday": baselines.seasonal_naive, **{n: f.predict for n, f in fits.items()}}
    each: dict[str, Both] = {}
    for name, predict in means.items():
        validation = predict(parts.validation)
        each[name] = tuple(
            baselines.with_residual_spread(validation, mean, parts.validation)
            for mean in (validation, predict(parts.test))
        )
    return each, {f"{name}: alpha": fit.alpha for name, fit in fits.items()}


def _train(args: argparse.Namespace, parts: Parts, scale: float) -> Forecaster:
    train, validation = tokens(parts.train, scale), tokens(parts.validation, scale)
    size = Size(args.structure)
    graph, params = nnx.split(
        Forecaster(size, train.target_calendar.shape[-1], nnx.Rngs(args.seed))
    )
    options: dict[str, Any] = {
        "num_steps": args.steps,
        "batch_size": min(args.batch_size, len(train.correction)),
        "kl_weight": args.kl_weight,
    }
    task = forecast_training.task(graph, train, validation, **options)
    settings = {"structure": args.structure, **options}
    state = fit_saved(task, params, args, "", settings, args.seed + 1, SAVE_EVERY)
    assert state.best is not None
    return nnx.merge(graph, state.best.params)


def _described(parts: Parts) -> dict[str, dict[str, Any]]:
    """Windows of each part, and the hours from the first known to the last wanted one."""
    described = {}
    for name, part in parts._asdict().items():
        borders = (part.origin[0] - part.past.shape[1], part.origin[-1] + part.future.shape[1] - 1)
        first, last = (str(START + datetime.timedelta(hours=int(hour))) for hour in borders)
        described[name] = {"windows": len(part.origin), "first": first, "last": last}
    return described


def _scores(each: dict[str, Both], parts: Parts, which: int) -> dict[str, dict[str, float]]:
    part = parts[1 + which]
    return {name: baselines.scores(both[which], part) for name, both in each.items()}


def _sampled(
    args: argparse.Namespace,
    network: Forecaster,
    parts: Parts,
    scale: float,
    analytic: tuple[Forecast, np.ndarray],
) -> dict[str, Any]:
    """The analytic forecast beside that of sampled networks, on some of the test windows."""
    chosen = np.unique(np.linspace(0, len(parts.test.origin) - 1, NUM_SAMPLED).round().astype(int))
    forecast, parameter_sd = analytic
    some = forecast.part(chosen), parameter_sd[chosen]
    key = jax.random.key(args.seed + 2)
    part = parts.test.part(chosen)
    return forecast_training.against_samples(network, part, some, scale, key, args.samples)


def _figure(part: Windows, forecast: Forecast, shown: np.ndarray) -> Figure:
    """Some windows: the temperatures above, and below what differs from yesterday, with both bands."""
    yesterday = seasonal_naive(part)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2, len(shown), figsize=(2.7 * len(shown), 4.6), height_ratios=(1, 1.4), squeeze=False
        )
        for column, i in zip(axes.T, shown, strict=True):
            start = START + datetime.timedelta(hours=int(part.origin[i]))
            column[0].set_title(f"{start:%d %b, from %H:%M}")
            column[0].plot(np.arange(-PAST, 0) + 1, part.past[i], color="0.6", lw=1)
            column[0].plot(HORIZON, part.future[i], "k.", ms=3)
            column[0].plot(HORIZON, forecast.mean[i], color=BAYES, lw=1)
            _bands(column[1], forecast.mean[i] - yesterday[i], forecast.sd[i])
            column[1].plot(HORIZON, part.future[i] - yesterday[i], "k.", ms=4, label="truth")
            column[1].axhline(0, color="0.6", lw=0.7)
            column[1].set_xlabel("hours ahead")
        axes[0, 0].set_ylabel("temperature (°F)")
        axes[1, 0].set_ylabel("minus yesterday's (°F)")
        axes[1, 0].legend(fontsize=7)
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
    print(report.aligned(rows))
    pair = metrics["sampled"]
    print(
        f"analytic against {metrics['settings']['samples']:,} sampled networks on {pair['windows']} "
        f"windows, before the factor: NLL {pair['analytic']['nll']:.4f} and "
        f"{pair['sampled']['nll']:.4f}; sd ratio {pair['total_sd']['sd_ratio']:.3f} with the noise, "
        f"{pair['parameter_sd']['sd_ratio']:.3f} without"
    )
    print(
        f"sds times {metrics['sd_factor']:.3f} by the validation part; KL weight "
        f"{metrics['settings']['kl_weight']:g}; {metrics['seconds']['total']:.0f} s in all; in {out}"
    )
