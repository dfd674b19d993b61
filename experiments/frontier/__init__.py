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

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import moment_jax as mj
from experiments.command_line import Parser, PartError
from experiments.frontier import tables
from experiments.frontier.measure import Limits, measure
from experiments.frontier.problem import DEFAULT, NETWORKS
from experiments.frontier.problems import Problems
from experiments.outputs import writable_file, writable_folder, write_json
from experiments.programs import failure, warm_up

__all__ = ["add_arguments", "run"]


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
    if args.json is not None:
        writable_file(args.json, "--json")
    structures = {name: mj.STRUCTURES[name] for name in dict.fromkeys(args.structure)}
    limits = Limits(args.repeats, args.array_limit, args.memory_limit)
    problems = Problems(out, args.samples, args.seed)
    warm_up()
    records: list[dict[str, Any]] = []
    for name in names:
        start = time.perf_counter()
        records += _measured(name, problems, structures, limits)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        for path in (out / "frontier.json", args.json):
            if path is not None:
                write_json(path, records)
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
    except Exception as error:  # a bad network is not to stop the others
        return [
            {"network": name, "structure": structure, "about": about, **failure(error)}
            for structure in structures
        ]


def _report(records: list[dict[str, Any]]) -> None:
    print("Agreement with the sampled truth\n" + tables.accuracy_table(records))
    print(
        "\nOver the plain network; Monte Carlo samples of the same "
        "sd error, and those over the cost of the forward\n" + tables.cost_table(records)
    )
    said = tables.reasons(records)
    if said:
        print("\n" + said)
