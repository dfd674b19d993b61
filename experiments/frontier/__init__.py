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

import moment_jax as mj
from experiments.command_line import Parser, PartError, writable_folder
from experiments.frontier import measure
from experiments.frontier.measure import Record
from experiments.frontier.problem import DEFAULT, NETWORKS
from experiments.frontier.problems import Problems
from experiments.outputs import write_json
from experiments.programs import failure, warm_up
from experiments.report import aligned

FIGURES = mj.reference.Agreement._fields
SHORT = ("mean err", "sd ratio", "|r-1|", "corr")
COSTS = ("time_ratio", "memory_ratio", "compile_ratio")


def add_arguments(parser: Parser) -> None:
    """The options of the frontier."""
    parser.choice("--networks", NETWORKS, DEFAULT, "networks")
    parser.choice("--structure", mj.STRUCTURES, None, "structures")
    kept = (
        "frontier.json, trained posteriors and sampled truths; what is there already is used again"
    )
    parser.out("runs/frontier", kept)
    drawn = (
        "networks drawn for the truth; a sd is then right to 1 / sqrt(2 N) (default: 4000 or fewer)"
    )
    parser.whole("--samples", None, drawn, least=16)
    parser.whole("--repeats", 10, "the most timed runs of each function; slow ones get fewer")
    parser.seed("random seed of random posteriors and of the truth's samples")


def run(args: argparse.Namespace) -> None:
    """Measure every network; write the figures after each and print the tables at the end."""
    out = writable_folder(args.out, "--out")
    problems = Problems(out, args.samples, args.seed)
    warm_up()
    records: list[Record] = []
    for name in (name for name in NETWORKS if name in args.networks):
        start = time.perf_counter()
        records += _measured(name, problems, args)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        write_json(out / "frontier.json", records)
    print("Agreement with the sampled truth\n" + _accuracy_table(records))
    print(
        "\nOver the plain network; Monte Carlo samples of the same "
        "sd error, and those over the cost of the forward\n" + _cost_table(records)
    )
    for record in records:
        if record["status"] != "ok":
            print("\n{network} {structure} {status}: {reason}".format_map(record))
    failed = dict.fromkeys(r["network"] for r in records if r["status"] == "failed")
    if failed:
        raise PartError(f"failed: {', '.join(failed)}; the reasons are in {out / 'frontier.json'}")


def _measured(name: str, problems: Problems, args: argparse.Namespace) -> list[Record]:
    """The records of one network; a failure is a record too."""
    try:
        problem = problems.problem(NETWORKS[name])
        return measure.records_of(problem, problems.truth(problem), args)
    except Exception as error:  # go on with the other networks
        failed = failure(error)
        return [{"network": name, "structure": each, **failed} for each in args.structure]


def _accuracy_table(records: list[Record]) -> str:
    """The four figures of the library at the tokens and at the logits.

    Also the relative error of the logits' covariance over the classes (Frobenius), the mean error of the
    predictive probabilities, and the truth's own relative error of a sd (root mean square).
    """
    header = [f"{output} {name}" for output in ("tok", "log") for name in SHORT]
    header += ["class cov", "p err", "tok noise", "log noise"]

    def cells(record: Record) -> list[str]:
        parts = record["tokens"], record["logits"]
        figures = [part[name] for part in parts for name in FIGURES]
        figures += [parts[1]["cov_error"], record["probability_error"]]
        return [f"{figure:.4f}" for figure in figures + [part["resolution"] for part in parts]]

    return _table(records, header, cells)


def _cost_table(records: list[Record]) -> str:
    """Ratios to the plain network, and what sampling would need."""
    header = [f"{kind} {what}" for kind in ("fwd", "step") for what in ("time", "mem", "comp")]
    header += ["tok MC", "tok adv", "log MC", "log adv"]

    def cells(record: Record) -> list[str]:
        parts = [record["cost"].get(kind, {}) for kind in ("forward", "step")]
        found = [part.get(name) for part in parts for name in COSTS]
        ratios = ["-" if ratio is None else f"{ratio:.1f}x" for ratio in found]
        for part in (record["tokens"], record["logits"]):
            # Errors within the truth's own noise bound the advantage from below.
            sign = ">" if part["at_resolution"] else ""
            needed = part["monte_carlo"]
            ratios += [f"{sign}{needed['samples']:.0f}", f"{sign}{needed['ratio']:.1f}"]
        return ratios

    return _table(records, header, cells)


def _table(records: list[Record], header: list[str], cells: Callable[[Record], list[str]]) -> str:
    label = max(len(record["network"]) for record in records)
    rows = [["network".ljust(label) + "  structure", *header]]
    for record in records:
        measured = record["status"] == "ok"
        figures = cells(record) if measured else [record["status"], *[""] * (len(header) - 1)]
        rows.append([f"{record['network']:{label}s}  {record['structure']}", *figures])
    return aligned(rows)
