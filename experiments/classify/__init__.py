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
from experiments.command_line import number, one_of, path
from experiments.common_options import add_seed
from experiments.figures import save
from experiments.outputs import writable_folder, write_json
from experiments.report import aligned

__all__ = ["add_arguments", "run"]

SHIFTED = 250  # images of each shift and of each kind of other images
TRAININGS = ("sampled", "Diagonal", "TokenCorrelated", "Separable")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the comparison."""
    add, count = parser.add_argument, number(int, least=1)
    add(
        "--data",
        type=one_of(images.SETS, "data set"),
        default="digits",
        metavar="NAME",
        help=f"images: {', '.join(images.SETS)} (default: %(default)s)",
    )
    add(
        "--out",
        type=path,
        metavar="DIR",
        help="folder for metrics.json and figures (default: runs/classify/NAME of --data)",
    )
    add_seed(parser, "random seed of weights, batches and samples; never of the split")
    add(
        "--structure",
        type=one_of(dict.fromkeys(TRAININGS), "way to train"),
        default=Recipe.training,
        metavar="NAME",
        help=f"structure of the ELBO's training: {', '.join(TRAININGS)}; predictions are Separable "
        "(default: %(default)s)",
    )
    numbers = (
        ("--seeds", count, 5, "N", "how many times all is done"),
        ("--blocks", count, 1, "N", "of the Transformer"),
        ("--members", count, 5, "N", "plain networks in the ensemble"),
        (
            "--bayesian-members",
            count,
            Recipe.members,
            "N",
            "Bayesian ones in theirs, --members at most",
        ),
        ("--plain-steps", count, Budget().plain_steps, "N", "updates of a plain network"),
        ("--steps", count, Budget().steps, "N", "updates of a Bayesian network"),
        ("--kl-weight", number(float, least=0), Recipe.kl_weight, "X", "weight of the KL"),
        (
            "--samples",
            number(int, least=2),
            50,
            "N",
            "drawn networks that predict, where they are drawn",
        ),
    )
    for name, kind, default, metavar, what in numbers:
        add(
            name, type=kind, default=default, metavar=metavar, help=f"{what} (default: %(default)s)"
        )


def run(args: argparse.Namespace) -> None:
    """Train all methods, compare them, write what came out."""
    start = time.perf_counter()
    task = images.load(args.data)
    out = writable_folder(args.out or Path("runs/classify") / args.data, "--out")
    network = Network.of(task, args.blocks)
    budget = Budget(plain_steps=args.plain_steps, steps=args.steps)
    keys = jax.random.split(jax.random.key(args.seed), args.members * args.seeds)
    given = stacked(task.train, len(keys))
    trainer = Trainer(network, given, partial(_moved, background=task.background), budget, keys)
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
            name: _over_seeds([scores.detection(*pair) for pair in zip(test, given, strict=True)])
            for name, given in other.items()
        },
        "area_under_risk": scores.summary(risks.mean(axis=1).tolist()),
        "seconds_of_training": method.seconds / len(test),
        "seconds_per_image": seconds,
        "chosen": method.chosen,
    }
    return record, {"test": test, **other, "risk": risks}


def _scores(given: np.ndarray, labels: np.ndarray) -> dict[str, dict[str, float]]:
    return _over_seeds([predictions.scores(one, labels) for one in given])


def _over_seeds(found: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {key: scores.summary([one[key] for one in found]) for key in found[0]}


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
