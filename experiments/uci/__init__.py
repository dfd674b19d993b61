"""Regression on UCI sets by the published protocol: one hidden layer of 50 ReLU units, 20 splits.

Trains a Bayesian network by moments, with noise that is a share of each weight, and the same network by
the ELBO at KL weight 1, and by MC dropout, with one noise variance and with
one that depends on the input. Open settings (shares, priors, dropout rates, a factor on the noise
variance) are chosen for each split on a fifth of its training rows. Prints errors, negative
log-likelihoods and paired differences; writes metrics.json.
"""

import argparse
import time
from functools import partial
from typing import Any

import jax

from experiments.command_line import InputError, Parser, named_files, writable_folder
from experiments.outputs import aligned, summary, with_error, write_json
from experiments.uci.methods import METHODS, perceptron
from experiments.uci.sets import RegressionSet, held_out, read_set, whole
from experiments.uci.training import Trained, choose_and_fit

NOISES = {"homoscedastic": 1, "heteroscedastic": 2}
"""The noise models, with the number of outputs that each needs."""


def add_arguments(parser: Parser) -> None:
    """The options of the regression."""
    parser.sets("folder of .npz sets with x, y, train_idx and test_idx", "all in the folder")
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
    sets = [read_set(path, args.splits) for path in named_files(args, ".npz")]
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
    build = partial(perceptron, given.x.shape[1], NOISES[noise])
    parts, sizes = (held_out(given, args.seed), whole(given)), (args.steps, args.batch_size)
    records: dict[str, Any] = {}
    first: Trained | None = None
    for method in (METHODS[name] for name in dict.fromkeys(args.methods)):
        label, key = f"{given.name}, {noise}, {method.name}", jax.random.key(args.seed)
        found = choose_and_fit(method, build, *parts, sizes, key, label)
        first = first or found
        records[method.name] = {
            "nll": summary(found.nll.tolist()),
            "rmse": summary(found.rmse.tolist()),
            "nll_above_first": summary((found.nll - first.nll).tolist()),  # split by split
            "nll_of_splits": found.nll,
            "rmse_of_splits": found.rmse,
            "chosen": found.setting,
            "noise_factor": found.factor,
            "seconds": found.seconds,
        }
    return records


def _print(name: str, record: dict[str, Any]) -> None:
    rows = [[name, "NLL", "RMSE", "NLL above the first, paired"]]
    for noise in NOISES:
        for method, found in record[noise].items():
            cells = [with_error(found[k]) for k in ("nll", "rmse", "nll_above_first")]
            rows.append([f"{noise}: {method}", *cells])
    print(aligned(rows) + "\n")
