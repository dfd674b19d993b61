"""Regression on UCI sets by the published protocol: one hidden layer of 50 ReLU units, 20 splits.

Trains a Bayesian network by moments, with noise that is a share of each weight, and the same network by
the ELBO at KL weight 1, from moments and from draws, and by MC dropout, with one noise variance and with
one that depends on the input. Open settings (shares, priors, dropout rates, a factor on the noise
variance) are chosen for each split on a fifth of its training rows. Prints errors, negative
log-likelihoods and paired differences; writes metrics.json.
"""

import argparse
import time
from typing import Any

import jax

from experiments.classify.scores import summary
from experiments.command_line import InputError, Parser, writable_folder
from experiments.outputs import write_json
from experiments.report import aligned
from experiments.uci.methods import METHODS
from experiments.uci.networks import NETWORKS
from experiments.uci.sets import RegressionSet, held_out, read_sets, whole
from experiments.uci.training import Budget, Trained, choose_and_fit

NOISES = {"homoscedastic": 1, "heteroscedastic": 2}
"""The noise models, with the number of outputs that each needs."""


def add_arguments(parser: Parser) -> None:
    """The options of the regression."""
    parser.source("--data-dir", "folder of .npz sets with x, y, train_idx and test_idx")
    parser.add_argument(
        "--set",
        nargs="+",
        metavar="NAME",
        help="sets, by their files' names without .npz (default: all in the folder)",
    )
    parser.choice(
        "--network",
        NETWORKS,
        "perceptron",
        "the protocol's, or a Transformer with a token a feature",
    )
    parser.choice("--methods", METHODS, None, "methods, compared with the first")
    parser.out("runs/uci", "metrics.json")
    parser.seed()
    parser.whole("--splits", 20, "splits of each set, the first ones")
    parser.whole("--steps", 4000, "updates of every training")
    parser.whole("--batch-size", 128, "rows for each update, a multiple of 16")


def run(args: argparse.Namespace) -> None:
    """Read all sets before anything is computed, then go through them."""
    start = time.perf_counter()
    if args.batch_size % 16:
        raise InputError(f"--batch-size needs a multiple of 16, got {args.batch_size}")
    sets = read_sets(args.data_dir, args.set, args.splits)
    out = writable_folder(args.out, "--out")
    metrics: dict[str, Any] = {"settings": vars(args), "sets": {}}
    for given in sets:
        metrics["sets"][given.name] = {noise: _compare(args, given, noise) for noise in NOISES}
        metrics["seconds"] = time.perf_counter() - start
        write_json(out / "metrics.json", metrics)
        _print(given.name, metrics["sets"][given.name])
    print(f"{metrics['seconds']:.0f} s in all; metrics.json in {out}")


def _compare(args: argparse.Namespace, given: RegressionSet, noise: str) -> dict[str, Any]:
    """Every method's scores on every split."""
    budget = Budget(args.steps, args.batch_size)
    network = NETWORKS[args.network](given.x.shape[1], NOISES[noise])
    parts = held_out(given, args.seed), whole(given)
    results = {}
    for kind in dict.fromkeys(args.methods):
        method = METHODS[kind](network)
        label = f"{given.name}, {noise}, {method.name}"
        key = jax.random.key(args.seed)
        results[method.name] = choose_and_fit(method, *parts, budget, key, label)
    first = next(iter(results.values()))
    return {name: _record(result, first) for name, result in results.items()}


def _record(result: Trained, first: Trained) -> dict[str, Any]:
    """Means, standard errors, and the difference to the first method, split by split."""
    return {
        "nll": summary(result.scores.nll.tolist()),
        "rmse": summary(result.scores.rmse.tolist()),
        "nll_above_first": summary((result.scores.nll - first.scores.nll).tolist()),
        "nll_of_splits": result.scores.nll,
        "rmse_of_splits": result.scores.rmse,
        "chosen": result.setting,
        "noise_factor": result.factor,
        "seconds": result.seconds,
    }


def _print(name: str, record: dict[str, Any]) -> None:
    rows = [[name, "NLL", "RMSE", "NLL above the first, paired"]]
    for noise in NOISES:
        for method, found in record[noise].items():
            keys = ("nll", "rmse", "nll_above_first")
            cells = [f"{found[key]['mean']:.3f} ± {found[key]['error']:.3f}" for key in keys]
            rows.append([f"{noise}: {method}", *cells])
    print(aligned(rows) + "\n")
