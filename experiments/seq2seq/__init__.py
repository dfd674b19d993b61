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
import datetime
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm
from sklearn.linear_model import Ridge

import moment_jax as mj
from experiments.checkpoints import run_folder
from experiments.command_line import Parser
from experiments.figures import BAYES, Figure, plt, save, styled
from experiments.outputs import aligned, write_json
from experiments.seq2seq import data, network
from experiments.seq2seq.data import DAY, START, Parts, Windows, tokens
from experiments.training import fit_saved

ALPHAS = tuple(10.0**power for power in range(-8, 5))
LEVELS = (0.5, 0.9)
NAIVE, RIDGE, NETWORK = "yesterday", "ridge", "Bayesian Transformer"
NUM_SHOWN = 5
HORIZON = np.arange(1, DAY + 1)
CHUNK = 128  # windows of a pass


def add_arguments(parser: Parser) -> None:
    """The options of the experiment."""
    # The windows overlap: a KL weight of 24 would count each hour once.
    parser.training("runs/seq2seq", steps=600, batch_size=32, kl_weight=4.0)


def run(args: argparse.Namespace) -> None:
    """Fit the baselines, train the network, compare them, and write the results."""
    begin = time.perf_counter()
    parts = data.split(data.load())
    out = run_folder(args)
    forecasts, alpha = baselines(parts)
    # Root mean square of the changes from one day to the next at the same hour, in degrees.
    scale = float(np.sqrt(np.mean((parts.train.future - yesterday(parts.train)) ** 2)))
    model = _train(args, parts, scale)
    seconds = {"training": time.perf_counter() - begin}
    own = [_forecast(model, part, scale) for part in parts[1:]]
    # That makes the validation part likeliest: the root mean square of z.
    z = (parts.validation.future - own[0].mean()) / own[0].std()
    factor = float(np.sqrt(np.mean(z**2)))
    forecasts[NETWORK] = [norm(each.mean(), factor * each.std()) for each in own]
    validation, test = (
        {name: scores(each[i], part.future) for name, each in forecasts.items()}
        for i, part in enumerate(parts[1:])
    )
    save(_figure(parts.test, forecasts[NETWORK][1]), out / "forecasts.png")
    metrics: dict[str, Any] = {
        "settings": vars(args), "scale": scale, "alpha": alpha, "kl": float(model.kl()),
        "validation": validation, "test": test, "sd_factor": factor,
        "without_sd_factor": scores(own[1], parts.test.future),
        "seconds": seconds | {"total": time.perf_counter() - begin},
    }  # fmt: skip
    write_json(out / "metrics.json", metrics)
    _print(out, metrics)


def yesterday(part: Windows) -> np.ndarray:
    """Its values again, (N, 24)."""
    return part.past[:, -DAY:]


def baselines(parts: Parts) -> tuple[dict[str, list[Any]], float]:
    """Forecasts of the validation part and of the test part by name, and the ridge's alpha.

    Their spread at each horizon is the root mean square of the validation part's residuals.
    """
    alpha, regression = ridge(parts)
    forecasts = {}
    for name, means in ((NAIVE, [yesterday(part) for part in parts[1:]]), (RIDGE, regression)):
        spread = np.sqrt(np.mean((parts.validation.future - means[0]) ** 2, axis=0))
        forecasts[name] = [norm(mean, spread) for mean in means]
    return forecasts, alpha


def ridge(parts: Parts) -> tuple[float, list[np.ndarray]]:
    """Ridge regression of the 24 changes since yesterday on the two differences of the days.

    Without intercept: the linear model of which the network's is the nonlinear one, and which, like it,
    takes warming and cooling for mirror images. Fitted on the training part; its alpha, in units of the
    regressors' variance, has the least validation error. Gives alpha, and the means of the later parts.
    """
    inputs, *later = (np.diff(part.days, axis=1).reshape(len(part.past), -1) for part in parts)
    changes = parts.train.future - yesterday(parts.train)
    means = {}
    for alpha in ALPHAS:
        model = Ridge(alpha=alpha * inputs.var(), fit_intercept=False, solver="svd")
        fit = model.fit(inputs, changes)
        means[alpha] = [
            yesterday(p) + fit.predict(x) for p, x in zip(parts[1:], later, strict=True)
        ]
    best = min(ALPHAS, key=lambda a: np.mean((parts.validation.future - means[a][0]) ** 2))
    return best, means[best]


def scores(forecast: Any, truth: np.ndarray) -> dict[str, float]:
    """Negative log-likelihood (nats an hour), CRPS and error in degrees, and coverage.

    The CRPS of a Gaussian is Eq. 21 of Gneiting and Raftery (2007), with the sign turned.
    """
    error, sd = truth - forecast.mean(), forecast.std()
    z = error / sd
    crps = z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - np.pi**-0.5
    inside = {level: np.abs(z) <= norm.ppf((1 + level) / 2) for level in LEVELS}
    return {
        "nll": float(-forecast.logpdf(truth).mean()),
        "crps": float(np.mean(sd * crps)),
        "rmse": float(np.sqrt(np.mean(error**2))),
        **{f"coverage_{100 * level:.0f}": float(inside[level].mean()) for level in LEVELS},
    }


def _train(args: argparse.Namespace, parts: Parts, scale: float) -> mj.Bayesian:
    train, validation = tokens(parts.train, scale), tokens(parts.validation, scale)
    model = network.bayesian_forecaster(args.structure, train.target_calendar.shape[-1], args.seed)
    _forecast(model, parts.validation, scale)  # else the pass is held to the network afterwards
    task = network.task(
        train, validation, num_steps=args.steps, kl_weight=args.kl_weight,
        batch_size=min(args.batch_size, len(train.correction)), structure=args.structure,
    )  # fmt: skip
    trained: mj.Bayesian = fit_saved(task, model, args, "", args.seed).model
    return trained


def _forecast(model: mj.Bayesian, part: Windows, scale: float) -> Any:
    """In degrees, by one pass of moments."""
    found = model.predict(*tokens(part, scale)[:3], batch_size=CHUNK)
    mean, sd = (scale * np.asarray(x[..., 0]) for x in (found.mean, found.sd))
    return norm(yesterday(part) + mean, sd)


@styled
def _figure(part: Windows, forecast: Any) -> Figure:
    """Some windows of all seasons of a part: what differs from yesterday, with both bands."""
    shown = np.linspace(0, len(part.origin) - 1, NUM_SHOWN).round().astype(int)
    figure, axes = plt.subplots(1, NUM_SHOWN, figsize=(2.7 * NUM_SHOWN, 3.1), sharey=True)
    naive = yesterday(part)
    for axis, i in zip(axes, shown, strict=True):
        start = START + datetime.timedelta(hours=int(part.origin[i]))
        for level, shade in zip(LEVELS, (0.45, 0.2), strict=True):
            band = [end[i] - naive[i] for end in forecast.interval(level)]
            label = f"{100 * level:.0f} % band"
            axis.fill_between(HORIZON, *band, color=BAYES, alpha=shade, lw=0, label=label)
        axis.plot(HORIZON, forecast.mean()[i] - naive[i], color=BAYES, lw=1, label="forecast")
        axis.plot(HORIZON, part.future[i] - naive[i], "k.", ms=4, label="truth")
        axis.axhline(0, color="0.6", lw=0.7)
        axis.set(title=f"{start:%d %b, from %H:%M}", xlabel="hours ahead")
    axes[0].set_ylabel("change since yesterday (°F)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


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
