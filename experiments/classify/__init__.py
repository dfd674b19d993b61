"""Classify images with a Bayesian vision Transformer, against what people use for uncertainty.

Compares it with the plain network, an ensemble of five, MC dropout, sampled variational inference and
Laplace approximations, on test images, on the same turned and blurred, and on images that are none of
the classes. What a method leaves open is chosen on validation images. Prints a table with means and
standard errors over the seeds; writes metrics.json and figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import data, predictions
from experiments.classify import figures, images, scores
from experiments.classify.compared import Compared, train_all
from experiments.classify.images import Task
from experiments.classify.methods import Budget, Recipe, Trainer, stacked
from experiments.classify.networks import Network
from experiments.command_line import Parser
from experiments.figures import save
from experiments.outputs import writable_folder, write_json
from experiments.report import aligned

__all__ = ["add_arguments", "run"]

SHIFTED = 250  # images of each shift and of each kind of other images
TRAININGS = ("sampled", "Diagonal", "TokenCorrelated", "Separable")


def add_arguments(parser: Parser) -> None:
    """The options of the comparison."""
    parser.choice("--data", images.SETS, "digits", "images")
    parser.place(
        "--out",
        None,
        "folder for metrics.json and figures (default: runs/classify/NAME of --data)",
    )
    parser.seed("random seed of weights, batches and samples; never of the split")
    parser.choice(
        "--structure",
        TRAININGS,
        Recipe.training,
        "structure of the ELBO's training, or sampling (predictions are Separable)",
    )
    parser.whole("--seeds", 5, "how many times all is done")
    parser.whole("--blocks", 1, "of the Transformer")
    parser.whole("--members", 5, "plain networks in the ensemble")
    parser.whole("--bayesian-members", Recipe.members, "Bayesian ones in theirs, --members at most")
    parser.whole("--plain-steps", Budget().plain_steps, "updates of a plain network")
    parser.whole("--steps", Budget().steps, "updates of a Bayesian network")
    parser.whole("--division", images.DIVISION, "seed of the split into parts", least=0)
    parser.flag("--still", "do not move training images")
    parser.real("--kl-weight", Recipe.kl_weight, "weight of the KL", least=0)
    parser.whole("--samples", 50, "drawn networks that predict, where they are drawn", least=2)


def run(args: argparse.Namespace) -> None:
    """Train all methods, compare them, write what came out."""
    start = time.perf_counter()
    task = images.load(args.data, args.division)
    out = writable_folder(args.out or Path("runs/classify") / args.data, "--out")
    network = Network.of(task, args.blocks)
    budget = Budget(plain_steps=args.plain_steps, steps=args.steps)
    keys = jax.random.split(jax.random.key(args.seed), args.members * args.seeds)
    given = stacked(task.train, len(keys))
    move = _still if args.still else partial(_moved, background=task.background)
    trainer = Trainer(network, given, move, budget, keys)
    members = min(args.bayesian_members, args.members)
    recipe = Recipe(args.structure, args.kl_weight, members=members)
    methods = train_all(trainer, args.seeds, recipe, task.validation, args.samples)
    shifts, others = _shifted(task), images.others(task)
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    records, said = {}, {}
    for name, method in methods.items():
        records[name], said[name] = _measure(method, task, shifts, others)
    metrics = {
        "settings": settings,
        "ece_bins": scores.BINS,
        "methods": records,
        "seconds": time.perf_counter() - start,
    }
    write_json(out / "metrics.json", metrics)
    _draw(out, task, records, said)
    _print(records)
    print(f"{metrics['seconds']:.0f} s in all; metrics.json and figures in {out}")


def _moved(key: jax.Array, given: jax.Array, background: float) -> jax.Array:
    """Images moved by up to an eighth of their side."""
    return data.shifted(key, given, background, given.shape[1] // 8)


def _still(key: jax.Array, given: jax.Array) -> jax.Array:
    """Images as they are."""
    del key
    return given


def _shifted(task: Task) -> dict[str, dict[float, np.ndarray]]:
    """The first test images at every strength of every shift."""
    some = task.test.images[:SHIFTED]
    turn: Callable[[float], np.ndarray] = partial(images.turned, some, background=task.background)
    return {
        "angle": {angle: turn(angle) for angle in images.ANGLES},
        "blur": {strength: images.blurred(some, strength) for strength in images.BLURS},
    }


def _measure(
    method: Compared, task: Task, shifts: dict[str, Any], others: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """All scores of one method, and its predictions on test and other images."""
    method.predict(task.test.images[:50])  # compiled before it is timed
    start = time.perf_counter()
    test = method.predict(task.test.images)
    seconds = (time.perf_counter() - start) / (len(test) * len(task.test.images))
    labels = task.test.labels
    other = {name: method.predict(given[:SHIFTED]) for name, given in others.items()}
    risks = np.stack([scores.risk_by_coverage(one, labels) for one in test])
    record = {
        "validation": _scores(method.predict(task.validation.images), task.validation.labels),
        "test": _scores(test, labels),
        "shifts": {
            shift: {
                strength: _scores(method.predict(given), labels[:SHIFTED])
                for strength, given in of_strength.items()
            }
            for shift, of_strength in shifts.items()
        },
        "others": {
            name: scores.over_seeds(
                [scores.detection(*pair) for pair in zip(test, given, strict=True)]
            )
            for name, given in other.items()
        },
        "area_under_risk": scores.summary(risks.mean(axis=1).tolist()),
        "seconds_of_training": method.seconds / len(test),
        "seconds_per_image": seconds,
        "chosen": method.chosen,
    }
    return record, {"test": test, **other, "risk": risks}


def _scores(given: np.ndarray, labels: np.ndarray) -> dict[str, dict[str, float]]:
    return scores.over_seeds([predictions.scores(one, labels) for one in given])


def _draw(
    out: Path, task: Task, records: dict[str, Any], said: dict[str, dict[str, np.ndarray]]
) -> None:
    curves = {
        shift: {
            name: {
                score: {s: found[score] for s, found in record["shifts"][shift].items()}
                for score in ("accuracy", "nll", "ece")
            }
            for name, record in records.items()
        }
        for shift in ("angle", "blur")
    }
    save(figures.shifts(curves), out / "shifts.png")
    save(
        figures.rejection({name: one["risk"] for name, one in said.items()}), out / "rejection.png"
    )
    entropies = {
        name: {which: scores.entropy(p).ravel() for which, p in one.items() if which != "risk"}
        for name, one in said.items()
    }
    save(figures.histograms(entropies), out / "others.png")


def _print(records: dict[str, Any]) -> None:
    def cell(found: dict[str, float]) -> str:
        return f"{found['mean']:.3f} ± {found['error']:.3f}"

    head = ["", "accuracy", "NLL", "Brier", "ECE", "NLL at 45°", "NLL at 60°", "AUROC, mean"]
    rows = [[*head, "training", "an image"]]
    for name, record in records.items():
        cells = [cell(record["test"][score]) for score in ("accuracy", "nll", "brier", "ece")]
        cells += [cell(record["shifts"]["angle"][angle]["nll"]) for angle in (45, 60)]
        area = np.mean([found["auroc"]["mean"] for found in record["others"].values()])
        times = [
            f"{record['seconds_of_training']:.0f} s",
            f"{1e3 * record['seconds_per_image']:.2f} ms",
        ]
        rows.append([name, *cells, f"{area:.3f}", *times])
    print(aligned(rows))
