"""Selective prediction: of one and the same posterior, which prediction ranks best, at what price.

Predictions whose largest averaged probability is highest are given, the rest is left. Scores are the
area under the risk-coverage curve (AURC: the mean share of errors over all coverages, lower is better)
and the coverage at a risk: the largest share of predictions that has so few errors.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import moment_jax as mj
from experiments import draws, predictions
from experiments.classify import methods
from experiments.classify.compared import KL_WEIGHT, Part
from experiments.classify.methods import Answers, Trainer
from experiments.command_line import Parser
from experiments.outputs import aligned, over_seeds, with_error, write_json
from experiments.programs import interleaved

SAMPLES = 4, 8, 32  # drawn networks
RISKS = 0.005, 0.01
WARM = 64  # inputs, without labels, by which `corrected` finds its factors
REPEATS = 7
COLUMNS = ("aurc", *(f"coverage at {risk:g}" for risk in RISKS), "accuracy", "nll")


def add_flag(parser: Parser) -> None:
    """`--selective`."""
    what = "only compare how each prediction by one posterior ranks; selective.json"
    parser.add_argument("--selective", action="store_true", help=what)


def run(
    trainer: Trainer, args: argparse.Namespace, some: np.ndarray, test: Part, out: Path
) -> None:
    """Train plain networks and one posterior of each seed; score and price every way to predict.

    The trainer has copies as for `train_all`, --members for each seed; `some` are inputs (L, N, ...).
    """
    first, every = trainer.first(args.seeds), trainer.plain()
    plain = every.first(args.seeds).models

    def alone(forward: methods.Forward, models: list[mj.Bayesian], *last: Any) -> Answers:
        return Answers(forward, [[model] for model in models], first.keys, *last)

    ways = {"a plain network": alone(methods.mean_softmax, plain)}
    together = Answers(methods.mean_softmax, every.members(args.seeds), first.keys)
    ways[f"{args.members} plain"] = together
    fitted = first.elbo(KL_WEIGHT, plain, "ELBO").models
    ways["the mean network"] = alone(methods.mean_softmax, fitted)
    diagonal = [model.replace(structure=mj.Diagonal) for model in fitted]
    pairs = zip(diagonal, some[:, :WARM], strict=True)
    by_moments = {
        "Diagonal": diagonal,
        "Diagonal, corrected": [model.corrected(x) for model, x in pairs],
        "Separable": [model.replace(structure=mj.Separable) for model in fitted],
    }
    for way, own in by_moments.items():
        ways[way] = alone(methods.moments, own, methods.expected_softmax)
    for count in SAMPLES:
        kind = methods.mean_of_draws(draws.weights, count)
        ways[f"{count} draws"] = alone(kind, fitted)
    scores = {name: zip(answers(test[0]), test[1], strict=True) for name, answers in ways.items()}
    found = {name: over_seeds([scored(*pair) for pair in pairs]) for name, pairs in scores.items()}
    batch = test[0][0, : methods.CHUNK]
    times = interleaved({name: _run(one.program(0), batch) for name, one in ways.items()}, REPEATS)
    rows = [["", *COLUMNS, "price in plain forwards"]]
    for name, record in found.items():
        record["price"] = times[name] / times["a plain network"]
        cells = [with_error(record[key], ".4f") for key in COLUMNS]
        rows.append([name, *cells, f"{record['price']:.1f}"])
    write_json(out / "selective.json", {"settings": vars(args), "ways": found})
    print(aligned(rows))


def _run(program: Callable[[Any], Any], batch: np.ndarray) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(program(batch))


def scored(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The scores of class probabilities (N, C)."""
    order = np.argsort(-probabilities.max(axis=1), kind="stable")
    wrong = (probabilities.argmax(axis=1) != labels)[order]
    risk = np.cumsum(wrong) / np.arange(1, len(labels) + 1)  # of the n surest, n = 1 .. N
    kept = [np.max(np.nonzero(risk <= limit)[0] + 1, initial=0) / len(labels) for limit in RISKS]
    coverage = {f"coverage at {limit:g}": float(x) for limit, x in zip(RISKS, kept, strict=True)}
    return {"aurc": float(risk.mean()), **coverage, **predictions.scores(probabilities, labels)}
