"""Classify images with a Bayesian vision Transformer, against what people use for uncertainty.

Compares it with the plain network, an ensemble of five, MC dropout, noise on the weights calibrated on
validation images, sampled variational inference and Laplace approximations, on test images, on the same
turned, and on images of none of the classes. Every seed has its own division into training, validation
and test images. Open settings, and a temperature for each method, are chosen on validation images.
Prints means and standard errors over the seeds, of the scores and of their differences from the plain
network's; writes metrics.json.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import predictions
from experiments.classify import images, scores, selective
from experiments.classify.compared import Answer, Compared, train_all
from experiments.classify.images import Task, classifier
from experiments.classify.methods import Budget, Trainer
from experiments.command_line import Parser, writable_folder
from experiments.outputs import aligned, duration, over_seeds, with_error, write_json

SHIFTED = 250  # images at each angle and of each kind of other images


def add_arguments(parser: Parser) -> None:
    """The options of the comparison."""
    parser.choice("--data", images.SETS, "digits", "images")
    what = "folder for metrics.json (default: runs/classify/NAME of --data)"
    parser.place("--out", None, what)
    parser.seed("first random seed, of the division too")
    what = "how many times all is done, with this seed and those that follow it"
    parser.whole("--seeds", 5, what)
    what = "plain networks in the ensemble (Bayesian ones: three, or as many)"
    parser.whole("--members", 5, what)
    parser.whole("--plain-steps", Budget().plain_steps, "updates of a plain network")
    parser.whole("--steps", Budget().steps, "updates of the ELBO")
    parser.whole("--samples", 50, "drawn networks that predict, where they are drawn", least=2)
    selective.add_flag(parser)


def run(args: argparse.Namespace) -> None:
    """Train and compare all methods; write the results."""
    start = time.perf_counter()
    seeds = range(args.seed, args.seed + args.seeds)
    task = images.load(args.data, seeds)
    out = writable_folder(args.out or Path("runs/classify") / args.data, "--out")
    budget = Budget(plain_steps=args.plain_steps, steps=args.steps)
    keys = jnp.stack([jax.random.split(jax.random.key(seed), args.members) for seed in seeds])
    given, labels = (np.concatenate([part] * args.members) for part in task.train)
    build = partial(classifier, task.test.images.shape[-1], task.patch_size)
    trainer = Trainer(build, (given, labels), budget, keys.T.ravel())
    if args.selective:
        selective.run(trainer, args, task.validation.images, task.test, out)
        return
    methods = train_all(trainer, args.seeds, task.validation, args.samples)
    predicted, before, after, rest = {}, {}, {}, {}
    for name, method in methods.items():
        raw, seconds = _predicted(method, task)
        temperature = scores.best_temperature(raw["validation"], task.validation.labels)
        predicted[name] = jax.tree.map(partial(scores.tempered, temperature=temperature), raw)
        before[name], after[name] = _scored(raw, task), _scored(predicted[name], task)
        rest[name] = {
            "seconds_per_image": seconds,
            "seconds_of_training": method.seconds / args.seeds,
            "chosen": {**method.chosen, "temperature": temperature},
        }
    records = {
        name: {
            **_record(after[name], after["plain"]),
            "without_temperature": _record(before[name], before["plain"]),
            **rest[name],
        }
        for name in methods
    }
    seconds = time.perf_counter() - start
    metrics = {"settings": vars(args), "ece_bins": predictions.BINS, "methods": records}
    write_json(out / "metrics.json", {**metrics, "seconds": seconds})
    _print(records)
    print(f"{seconds:.0f} s in all; metrics.json in {out}")


def _predicted(method: Compared, task: Task) -> tuple[dict[str, Any], float]:
    """Class probabilities of all images, for every seed (L, N, C); seconds of one."""
    test = task.test.images
    predicted, seconds = _timed(method.predict, test)
    some = test[:, :SHIFTED]
    angles = {angle: images.turned(some, angle, task.background) for angle in images.ANGLES}
    others = images.others(task, SHIFTED)
    more = {"validation": task.validation.images, "angle": angles, "others": others}
    answers = jax.tree.map(method.predict, more)
    return {"test": predicted, **answers}, seconds


def _timed(predict: Answer, given: np.ndarray) -> tuple[np.ndarray, float]:
    """Predictions for images (L, N, H, W), and the seconds for one image."""
    predict(given[:, :1])  # compiled before it is timed
    start = time.perf_counter()
    predicted = predict(given)
    return predicted, (time.perf_counter() - start) / (given.shape[0] * given.shape[1])


def _scored(predicted: dict[str, Any], task: Task) -> list[dict[str, Any]]:
    """All scores of each seed."""
    found = []
    for seed, (test, labels) in enumerate(zip(predicted["test"], task.test.labels, strict=True)):
        own = jax.tree.map(lambda given, seed=seed: given[seed], predicted)
        others = {name: scores.detection(test, given) for name, given in own["others"].items()}
        found.append({
            "validation": predictions.scores(own["validation"], task.validation.labels[seed]),
            "test": predictions.scores(test, labels),
            "angle": {
                angle: predictions.scores(given, labels[: len(given)])
                for angle, given in own["angle"].items()
            },
            "others": others,
            "auroc": float(np.mean([one["auroc"] for one in others.values()])),
            "calibrated_ece": scores.calibrated_ece(test),
        })  # fmt: skip
    return found


def _record(each: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and standard errors over the seeds, also of the differences from the plain network."""
    pairs = zip(each, plain, strict=True)
    differences = [jax.tree.map(np.subtract, one, base) for one, base in pairs]
    return {**over_seeds(each), "minus_plain": over_seeds(differences)}


def _print(records: dict[str, Any]) -> None:
    heads = ["validation NLL", "accuracy", "NLL", "Brier", "ECE"]
    heads += ["NLL at 45°", "NLL at 60°", "AUROC"]
    more = ["ECE's floor", "temperature", "training", "an image"]
    tables = {
        "": [[*heads, *more]], "minus plain": [heads],
        "without temperature": [heads], "the same, minus plain": [heads],
    }  # fmt: skip
    for name, record in records.items():
        raw = record["without_temperature"]
        for rows, one in zip(
            tables.values(), (record, record["minus_plain"], raw, raw["minus_plain"]), strict=True
        ):
            test, turned = one["test"], one["angle"]
            found = [one["validation"]["nll"], *map(test.get, ("accuracy", "nll", "brier", "ece"))]
            found += [turned[45]["nll"], turned[60]["nll"], one["auroc"]]
            rows.append([name, *map(with_error, found)])
        tables[""][-1] += [
            with_error(record["calibrated_ece"]),
            f"{record['chosen']['temperature']:.2f}",
            duration(record["seconds_of_training"]),
            duration(record["seconds_per_image"]),
        ]
    for title, rows in tables.items():
        print(aligned([[title, *rows[0]], *rows[1:]]), end="\n\n")
