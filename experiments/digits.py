"""Train a Bayesian vision Transformer on handwritten digits by the analytic ELBO.

Compares it with the same plain network, with networks sampled from the learned posterior, and with a
pass that takes tokens as independent; all of it for several seeds, each with its own division of the
images, by programs that are compiled once. Writes metrics.json and figures (of the first seed, but for
risk against coverage), and prints one table with standard errors over the seeds.
"""

import argparse
import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import ndimage

import moment_jax as mj
from experiments import data, digits_training, figures, predictions
from experiments.checkpoints import run_folder
from experiments.command_line import Parser
from experiments.data import Digits
from experiments.outputs import aligned, duration, over_seeds, with_error, write_json
from experiments.predictions import Prediction
from experiments.training import in_background, together

ANGLES = np.linspace(0.0, 90.0, 7)  # at which the test images are turned
SHOWN_ANGLES = (45.0, 60.0)
DRAWN = ("test", "validation")  # images that the drawn networks see too
SCORES = ("accuracy", "nll", "brier", "ece")

Results = dict[str, dict[Any, Prediction]]
"""Predictions by the name of the network and that of the images, see `_images`."""


def add_arguments(parser: Parser) -> None:
    """The options of the main job."""
    parser.training("runs/digits", steps=150, batch_size=32, kl_weight=0.1)
    parser.whole("--seeds", 3, "how many times all is done, with --seed and those that follow it")
    parser.whole("--plain-steps", 2200, "updates of the plain network")
    parser.whole("--samples", 300, "networks sampled from the posterior to compare with", least=2)


def run(args: argparse.Namespace) -> None:
    """Train and compare both networks for every seed; write the results."""
    start = time.perf_counter()
    out, seeds = run_folder(args), range(args.seed, args.seed + args.seeds)
    divisions = [data.load(seed) for seed in seeds]
    plain, bayesian = (
        [task(args, digits) for digits in divisions]
        for task in (digits_training.plain, digits_training.bayesian)
    )
    # All plain networks first, while the Bayesian program is compiled.
    networks = [digits_training.plain_network(seed) for seed in seeds]
    random = digits_training.bayesian_network(args, networks[0])
    given = jax.random.key(0), divisions[0].train
    (program,) = in_background(partial(plain[0].compile, networks[0], given))
    update, warm = in_background(
        partial(bayesian[0].compile, random, given),
        partial(_predict, args, networks[0], random, divisions[0], 0),
    )
    plains, fits = [], []
    for number, (seed, digits) in enumerate(zip(seeds, divisions, strict=True)):
        found = digits_training.fit(
            plain[number], args, networks[number], seed, digits.train, program.result
        )
        random = digits_training.bayesian_network(args, found.model)
        plains.append(found)
        fits.append(partial(
            digits_training.fit, bayesian[number], args, random, seed, digits.train, update.result
        ))  # fmt: skip
    fitted, records = together(fits), []
    warm.result()
    for seed, digits, *both in zip(seeds, divisions, plains, fitted, strict=True):
        results = _predict(args, both[0].model, both[1].model, digits, seed)
        records.append({
            "seconds": {"plain": both[0].seconds, "bayesian": both[1].seconds},
            "kl": float(both[1].model.kl()),
            **_compare(digits, results),
        })  # fmt: skip
        if seed == args.seed:
            _, *logits = (result["test"] for result in results.values())
            figures.save(figures.spread(*logits), out / "spread.png")
            figures.save(figures.doubt(logits[0], digits.test), out / "doubt.png")
    metrics = {
        "settings": vars(args),
        "angles": ANGLES.tolist(),
        **over_seeds(records),
        "seeds": records,
    }
    figures.save(figures.risk(metrics["risk"]), out / "risk.png")
    metrics["seconds"]["total"] = time.perf_counter() - start
    write_json(out / "metrics.json", metrics)
    _print(out, metrics)


def _images(digits: Digits) -> dict[Any, np.ndarray]:
    """Test and validation images, and the test images turned, by the angle in degrees."""
    options = {"axes": (2, 1), "reshape": False, "order": 1, "cval": digits.background}
    test = digits.test.images
    turned = {
        angle: np.asarray(ndimage.rotate(test, angle, **options), np.float32) for angle in ANGLES
    }
    return {"test": test, "validation": digits.validation.images, **turned}


def _predict(
    args: argparse.Namespace, plain: Any, random: mj.Bayesian, digits: Digits, seed: int
) -> Results:  # fmt: skip
    """Predictions of all four, by programs that all seeds share."""
    images = _images(digits)
    every = np.concatenate(list(images.values()))
    few = np.concatenate([images[name] for name in DRAWN])
    keys = jax.random.split(jax.random.key(seed + 2), args.samples)
    whole = {
        "plain network": predictions.in_chunks(predictions.plain, plain, every),
        "Bayesian, analytic": predictions.in_chunks(predictions.analytic, random, every),
        "tokens taken as independent": predictions.in_chunks(
            predictions.analytic, random.replace(structure=mj.Diagonal), few
        ),
        f"Bayesian, {args.samples:,} samples": predictions.sampled(random, few, keys),
    }
    ends = itertools.pairwise(np.cumsum([0, *map(len, images.values())]))
    parts = {name: slice(*own) for name, own in zip(images, ends, strict=True)}
    return {name: {of: result.at(p) for of, p in parts.items()} for name, result in whole.items()}


def _compare(digits: Digits, results: Results) -> dict[str, Any]:
    """Scores of all four, how the analytic logits agree with sampled ones, and what rotation does."""
    plain, analytic, independent, samples = results.values()
    agreements = [
        mj.reference.Agreement.of(*one["test"][1:3], *samples["test"][1:3])._asdict()
        for one in (analytic, independent)
    ]
    labels = {"test": digits.test.labels, "validation": digits.validation.labels}
    scores = {
        of: {
            name: {
                **predictions.scores(each[of].probabilities, labels[of]),
                "seconds_per_image": each[of].seconds_per_image,
            }
            for name, each in results.items()
        }
        for of in labels
    }
    curves = [_curve(each, labels["test"]) for each in (plain, analytic)]
    rotation = dict(zip(results, curves, strict=False))
    risk = {
        name: predictions.risk(results[name]["test"].probabilities, labels["test"]).tolist()
        for name in rotation
    }
    logits, independents = agreements
    return {
        **scores,
        "logits": logits,
        "independent": independents,
        "rotation": rotation,
        "risk": risk,
    }


def _curve(result: dict[Any, Prediction], labels: np.ndarray) -> dict[str, list[float]]:
    """Mean accuracy, NLL and entropy over the test images, by the angle."""
    turned = [result[angle].probabilities for angle in ANGLES]
    scores = [predictions.scores(given, labels) for given in turned]
    curve = {name: [score[name] for score in scores] for name in ("accuracy", "nll")}
    return curve | {"entropy": [float(predictions.entropy(given).mean()) for given in turned]}


def _print(out: Path, metrics: dict[str, Any]) -> None:
    logits, independent, settings = (metrics[k] for k in ("logits", "independent", "settings"))
    shown = [metrics["angles"].index(angle) for angle in SHOWN_ANGLES]
    heads = [f"NLL at {angle:.0f}°" for angle in SHOWN_ANGLES]
    rows = [["", "accuracy", "NLL", "Brier", "ECE", *heads, "time per image"]]
    for name, scores in metrics["test"].items():
        curve = metrics["rotation"].get(name)
        turned = [with_error(curve["nll"][i], ".2f") for i in shown] if curve else [""] * len(heads)
        time_per_image = duration(scores["seconds_per_image"]["mean"])
        rows.append([name, *(with_error(scores[key]) for key in SCORES), *turned, time_per_image])
    print(aligned(rows))
    print(
        f"analytic against sampled: logit sd ratio {with_error(logits['sd_ratio'])}, "
        f"correlation {logits['sd_correlation']['mean']:.3f}, mean error "
        f"{logits['mean_error']['mean']:.3f} sd; with tokens taken as independent the sd ratio is "
        f"{with_error(independent['sd_ratio'])}"
    )
    print(f"{settings['seeds']} seeds from {settings['seed']}; KL weight {settings['kl_weight']:g}; "
          f"{metrics['seconds']['total']:.0f} s in all; figures and metrics.json in {out}")  # fmt: skip
