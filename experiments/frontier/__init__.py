"""Error over cost for every structure: networks from one block to twelve, random and trained posteriors.

Each network is a pre-norm encoder with a certain linear head on the mean over tokens. Its moments
are compared with sampled truth at the tokens and at the logits: mean error in true sd, sd ratio,
mean of |ratio - 1|, correlation of the sds. Time, memory and compilation of the forward and of the
train step are ratios to those of the same plain network. The table says too how many sampled
networks give the same sd error, and that number over the cost of the moment forward. The linearised
network and 10 to 300 sampled ones are rows like any structure. Trained
posteriors come from sampled variational inference on scikit-learn's digits, so that no method of
moments is favoured; they and the sampled truths are kept in --out for the next run. The exit status
is 1 if a network failed; the others are measured all the same.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import moment_jax as mj
from experiments.command_line import Parser, PartError, writable_folder
from experiments.frontier.measure import Limits, measure
from experiments.frontier.problem import DEFAULT, NETWORKS
from experiments.frontier.problems import Problems
from experiments.outputs import write_json
from experiments.programs import failure, warm_up
from experiments.report import aligned

Record = dict[str, Any]
FIGURES = mj.reference.Agreement._fields
SHORT = ("mean err", "sd ratio", "|r-1|", "corr")
_COSTS = ("time_ratio", "memory_ratio", "compile_ratio")


def add_arguments(parser: Parser) -> None:
    """The options of the frontier."""
    parser.choice("--networks", NETWORKS, DEFAULT, "networks")
    parser.choice("--structure", mj.STRUCTURES, None, "structures")
    parser.out(
        "runs/frontier",
        "frontier.json, trained posteriors and sampled truths; what is there already is used again",
    )
    parser.json()
    parser.whole(
        "--samples",
        None,
        "networks drawn for the truth; a sd is then right to 1 / sqrt(2 N) (default: 4000, for large "
        "networks fewer)",
        least=16,
    )
    parser.whole(
        "--repeats",
        10,
        "the most timed runs of each function, interleaved; their medians count, and slow networks get "
        "fewer",
    )
    parser.seed(
        "random seed of random posteriors and of the truth's samples; a trained network has its own"
    )
    parser.real(
        "--array-limit",
        0.3,
        "skip a structure where one of its arrays is larger than this, in GiB",
        unit="GIB",
    )
    parser.real(
        "--memory-limit",
        12.0,
        "skip a structure whose compiled forward or train step needs more than this, in GiB",
        unit="GIB",
    )


def run(args: argparse.Namespace) -> None:
    """Measure every network; write the figures after each and print the tables at the end."""
    names = [name for name in NETWORKS if name in args.networks]
    out = writable_folder(args.out, "--out")
    structures = {name: mj.STRUCTURES[name] for name in dict.fromkeys(args.structure)}
    limits = Limits(args.repeats, args.array_limit, args.memory_limit)
    problems = Problems(out, args.samples, args.seed)
    warm_up()
    records: list[dict[str, Any]] = []
    for name in names:
        start = time.perf_counter()
        records += _measured(name, problems, structures, limits)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        write_json(out / "frontier.json", records)
        write_json(args.json, records)
    _report(records)
    failed = list(
        dict.fromkeys(record["network"] for record in records if record["status"] == "failed")
    )
    if failed:
        raise PartError(f"failed: {', '.join(failed)}; the reasons are in {out / 'frontier.json'}")


def _measured(
    name: str, problems: Problems, structures: dict[str, type[mj.Covariance]], limits: Limits
) -> list[dict[str, Any]]:
    """The records of one network; a failure is a record too."""
    spec = NETWORKS[name]
    about = {
        "blocks": spec.num_blocks,
        "tokens_per_sequence": spec.num_tokens,
        "features": spec.num_features,
        "batch": spec.batch,
        "kl_weight": None if spec.training is None else spec.training.kl_weight,
    }
    try:
        problem = problems.problem(spec)
        truth = problems.truth(problem)
        noise = {"samples": problems.samples_of(spec), **truth.noise()}
        records = measure(problem, truth, structures, limits, problems.seed + 1)
        return [{**record, "about": about, "truth": noise} for record in records]
    except Exception as error:  # go on with the other networks
        return [
            {"network": name, "structure": structure, "about": about, **failure(error)}
            for structure in structures
        ]


def _report(records: list[dict[str, Any]]) -> None:
    print("Agreement with the sampled truth\n" + _accuracy_table(records))
    print(
        "\nOver the plain network; Monte Carlo samples of the same "
        "sd error, and those over the cost of the forward\n" + _cost_table(records)
    )
    reasons = _reasons(records)
    if reasons:
        print("\n" + reasons)


def _accuracy_table(records: list[Record]) -> str:
    """The four figures of the library at the tokens and at the logits, and the truth's own noise.

    Also the relative error of the logits' covariance over the classes (Frobenius), the mean error of
    the predictive probabilities, and the negative log-likelihood beside that of the sampled truth. The
    noise is the mean standard error, at the tokens, of a mean in sd and of a sd relative to it.
    """
    header = [*(f"tok {name}" for name in SHORT), *(f"log {name}" for name in SHORT)]
    header += ["class cov", "p err", "nll", "MC nll", "mean noise", "sd noise"]

    def cells(record: Record) -> list[str]:
        parts = (record["tokens"], record["logits"])
        figures = [part[name] for part in parts for name in FIGURES]
        figures += [record["logits"]["cov_error"], *record["predictive"].values()]
        figures += [record["truth"]["tokens_mean_error"], record["truth"]["tokens_sd_error"]]
        return [f"{figure:.4f}" for figure in figures]

    return _table(records, header, cells)


def _cost_table(records: list[Record]) -> str:
    """Ratios to the plain network, and what sampling would need."""
    header = ["fwd time", "fwd mem", "fwd comp", "step time", "step mem", "step comp"]
    header += ["tok MC", "tok adv", "log MC", "log adv"]

    def cells(record: Record) -> list[str]:
        parts = (record["cost"]["forward"], record["cost"].get("step", {}))
        ratios = [
            f"{part[name]:.1f}x" if name in part else "-" for part in parts for name in _COSTS
        ]
        for part in (record["tokens"], record["logits"]):
            # Errors within the truth's own noise bound the advantage from below.
            sign = ">" if part["at_resolution"] else ""
            found = part["monte_carlo"]
            ratios += [f"{sign}{found['samples']:.0f}", f"{sign}{found['ratio']:.1f}"]
        return ratios

    return _table(records, header, cells)


def _table(records: list[Record], header: list[str], cells: Callable[[Record], list[str]]) -> str:
    """A row for each record."""
    label = max(len(record["network"]) for record in records)
    rows = [["network".ljust(label) + "  structure", *header]]
    for record in records:
        name = f"{record['network']:{label}s}  {record['structure']}"
        measured = record["status"] == "ok"
        figures = cells(record) if measured else [record["status"], *[""] * (len(header) - 1)]
        rows.append([name, *figures])
    return aligned(rows)


def _reasons(records: list[Record]) -> str:
    """One line for each record without figures."""
    return "\n".join(
        f"{record['network']} {record['structure']} {record['status']}: {record['reason']}"
        for record in records
        if record["status"] != "ok"
    )
