"""Train a Bayesian vision Transformer on handwritten digits by the analytic ELBO.

Compares it with the same plain network, and with networks sampled from the learned posterior; all of
it for several seeds, by programs that are compiled once. Writes metrics.json and figures (of the first
seed, but for the curves over the angle), and prints one table with standard errors over the seeds.
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
    out, digits = run_folder(args), data.load()
    images = _images(digits)
    plain, bayesian = digits_training.plain(args, digits), digits_training.bayesian(args, digits)
    # All plain networks first, while the Bayesian program is compiled.
    seeds = range(args.seed, args.seed + args.seeds)
    networks = [digits_training.plain_network(seed) for seed in seeds]
    key, random = jax.random.key(0), digits_training.bayesian_network(args, networks[0])
    (program,) = in_background(partial(plain.compile, networks[0], key))
    update, warm = in_background(
        partial(bayesian.compile, random, key),
        partial(_predict, args, networks[0], random, images, 0),
    )
    plains, fits = [], []
    for seed, network in zip(seeds, networks, strict=True):
        plains.append(digits_training.fit(plain, args, network, seed, program.result))
        random = digits_training.bayesian_network(args, plains[-1].model)
        fits.append(partial(digits_training.fit, bayesian, args, random, seed, update.result))
    fitted, records = together(fits), []
    warm.result()
    for seed, *both in zip(seeds, plains, fitted, strict=True):
        results = _predict(args, both[0].model, both[1].model, images, seed)
        records.append({
            "seconds": {"plain": both[0].seconds, "bayesian": both[1].seconds},
            "kl": float(both[1].model.kl()),
            **_compare(digits, results),
        })  # fmt: skip
        if seed == args.seed:
            _, analytic, samples = (result["test"] for result in results.values())
            figures.save(figures.spread(analytic, samples), out / "spread.png")
    metrics = {
        "settings": vars(args),
        "angles": ANGLES.tolist(),
        **over_seeds(records),
        "seeds": records,
    }
    figures.save(figures.doubt(ANGLES, metrics["rotation"]), out / "doubt.png")
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
    args: argparse.Namespace, plain: Any, random: mj.Bayesian, images: dict[Any, np.ndarray], seed: int
) -> Results:  # fmt: skip
    """Predictions of all three, by programs that all seeds share."""
    every = np.concatenate(list(images.values()))
    few = np.concatenate([images[name] for name in DRAWN])
    keys = jax.random.split(jax.random.key(seed + 2), args.samples)
    whole = {
        "plain network": predictions.in_chunks(predictions.plain, plain, every),
        "Bayesian, analytic": predictions.in_chunks(predictions.analytic, random, every),
        f"Bayesian, {args.samples:,} samples": predictions.sampled(random, few, keys),
    }
    ends = itertools.pairwise(np.cumsum([0, *map(len, images.values())]))
    parts = {name: slice(*own) for name, own in zip(images, ends, strict=True)}
    return {name: {of: result.at(p) for of, p in parts.items()} for name, result in whole.items()}


def _compare(digits: Digits, results: Results) -> dict[str, Any]:
    """Scores of all three, how the analytic logits agree with sampled ones, and what rotation does."""
    plain, analytic, samples = results.values()
    agreement = mj.reference.Agreement.of(
        analytic["test"].logit_mean, analytic["test"].logit_sd,
        samples["test"].logit_mean, samples["test"].logit_sd,
    )  # fmt: skip
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
    return {**scores, "logits": agreement._asdict(), "rotation": rotation}


def _curve(result: dict[Any, Prediction], labels: np.ndarray) -> dict[str, list[float]]:
    """Mean accuracy, NLL and entropy over the test images, by the angle."""
    turned = [result[angle].probabilities for angle in ANGLES]
    scores = [predictions.scores(given, labels) for given in turned]
    curve = {name: [score[name] for score in scores] for name in ("accuracy", "nll")}
    return curve | {"entropy": [float(predictions.entropy(given).mean()) for given in turned]}


def _print(out: Path, metrics: dict[str, Any]) -> None:
    logits, settings = metrics["logits"], metrics["settings"]
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
        f"{logits['mean_error']['mean']:.3f} sd"
    )
    print(f"{settings['seeds']} seeds from {settings['seed']}; KL weight {settings['kl_weight']:g}; "
          f"{metrics['seconds']['total']:.0f} s in all; figures and metrics.json in {out}")  # fmt: skip
