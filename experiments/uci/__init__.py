"""Tables by the published protocol: one hidden layer of 50 ReLU units, 20 splits of UCI sets.

Compares three networks by the evidence, as `mj.fit` trains them, whose noise depends on the input or is
one, with MC dropout, whose rate and noise are chosen for each split on a fifth of its training rows, and
with a Gaussian process; then classes of two of scikit-learn's tables. Prints negative log-likelihoods,
errors, differences paired by split, and seconds a split; writes metrics.json.
"""

import argparse
import time
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.command_line import Parser, named_files, writable_folder
from experiments.outputs import aligned, summary, with_error, write_json
from experiments.uci import classes
from experiments.uci.methods import METHODS
from experiments.uci.sets import RegressionSet, read_set


def add_arguments(parser: Parser) -> None:
    """The options of the comparison."""
    parser.sets("folder of .npz sets with x, y, train_idx and test_idx", "all in the folder")
    parser.choice("--methods", METHODS, None, "methods, compared with the first")
    parser.out("runs/uci", "metrics.json")
    parser.seed()
    parser.whole("--splits", 20, "splits of each set, the first ones")
    parser.whole("--folds", 5, "parts of the tables of classes; 0 for none", least=0)
    parser.whole("--steps", 20000, "updates by the evidence")
    parser.whole("--dropout-steps", 4000, "updates of MC dropout")


def run(args: argparse.Namespace) -> None:
    """Read all sets before anything is computed, then go through them."""
    start = time.perf_counter()
    sets = [read_set(path, args.splits) for path in named_files(args, ".npz")]
    out = writable_folder(args.out, "--out")
    metrics: dict[str, Any] = {"settings": vars(args), "sets": {}}
    tables: dict[str, Any] = {given.name: given for given in sets}
    for name in [*tables, *(classes.SETS if args.folds else ())]:
        if name in tables:
            found = _compare(args, tables[name])
        else:
            found = classes.compare(name, args.folds, args.steps, args.seed)
        metrics["sets"][name] = found
        metrics["seconds"] = time.perf_counter() - start
        write_json(out / "metrics.json", metrics)
        _print(name, found)
    print(f"{metrics['seconds']:.0f} s in all; metrics.json in {out}")


def _compare(args: argparse.Namespace, given: RegressionSet) -> dict[str, Any]:
    """Every method's scores on every split."""
    records: dict[str, Any] = {}
    first: list[float] = []
    for key in dict.fromkeys(args.methods):
        name, method = METHODS[key]
        steps, start = args.dropout_steps if "dropout" in key else args.steps, time.perf_counter()
        answers, nll, rmse = [], [], []
        splits = [*zip(given.train, given.test, strict=True)]
        for number, rows in enumerate(tqdm(splits, name, leave=False, disable=None)):
            train, test = ((given.x[part], given.y[part]) for part in rows)
            answers.append(method(train, test, args.seed + number, steps))
            nll.append(-float(np.mean(answers[-1].log_density)))
            rmse.append(float(np.sqrt(np.mean((answers[-1].mean - test[1]) ** 2))))
        first = first or nll
        above = np.subtract(nll, first).tolist()  # split by split
        scores = {"nll": nll, "rmse": rmse, "nll_above_first": above}
        records[name] = {k: summary(v) for k, v in scores.items()} | {
            "nll_of_splits": nll, "rmse_of_splits": rmse, "told": [a.told for a in answers],
            "seconds": (time.perf_counter() - start) / len(nll),
        }  # fmt: skip
    return records


def _print(name: str, records: dict[str, Any]) -> None:
    second = "rmse" if "rmse" in next(iter(records.values())) else "accuracy"
    rows = [[name, "NLL", second, "NLL above the first, paired", "seconds a split"]]
    for method, found in records.items():
        cells = [with_error(found[k]) for k in ("nll", second, "nll_above_first")]
        rows.append([method, *cells, f"{found['seconds']:.1f}"])
    print(aligned(rows) + "\n", flush=True)
