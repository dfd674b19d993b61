"""Train a Bayesian vision Transformer on handwritten digits by the analytic ELBO.

Compares it with the same plain network, and with networks sampled from the learned posterior; all of
it for several seeds, by programs that are compiled once. Writes metrics.json and figures (of the first
seed, but for the curves over the angle), and prints one table with standard errors over the seeds.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from scipy import ndimage

import moment_jax as mj
from experiments import data, digits_training, figures, predictions, report
from experiments.background import Background
from experiments.checkpoints import run_folder
from experiments.classify.scores import over_seeds
from experiments.command_line import Parser
from experiments.data import Digits
from experiments.digits_training import POSTERIORS, Training
from experiments.outputs import write_json
from experiments.predictions import CaughtUp, Prediction
from experiments.training import Compiled

TURNED_DIGIT = 6  # upside down it is a nine
ANGLES = np.linspace(0.0, 180.0, 37)
TEST_ANGLES = np.linspace(0.0, 90.0, 7)  # of all test images
SHOWN_ANGLES = (45.0, 60.0)


def add_arguments(parser: Parser) -> None:
    """The options of the main job."""
    parser.out("runs/digits")
    parser.resume()
    parser.seed("first random seed of weights, batches and samples; never of the split")
    parser.whole(
        "--seeds", 3, "how many times all is done, with this seed and those that follow it"
    )
    parser.choice(
        "--structure",
        mj.STRUCTURES,
        "BatchSeparable",
        "covariance structure (TokenBlock and Full are slow; for Full take --batch-size 4; what has "
        "trained in BatchSeparable predicts in Separable)",
    )
    parser.choice("--posterior", POSTERIORS, "factorized", "family of the beliefs about weights")
    parser.whole("--steps", 150, "updates of the Bayesian network")
    parser.whole("--batch-size", 32, "training images for each update, of both networks")
    parser.real("--learning-rate", 1e-3, "peak of the Bayesian network's cosine schedule")
    parser.real(
        "--kl-weight",
        0.1,
        "final weight of the KL divergence in the ELBO: 1 is Bayes' rule, less a cold posterior",
        least=0,
    )
    parser.whole("--warm-up", 50, "updates in which the weight of the KL rises from 0", least=0)
    parser.whole("--plain-steps", 2200, "updates of the plain network")
    parser.real("--plain-learning-rate", 5e-3, "peak of the plain network's cosine schedule")
    parser.real("--weight-decay", 0.3, "AdamW weight decay of the plain network", least=0)
    parser.whole("--samples", 300, "networks sampled from the posterior to compare with", least=2)
    parser.whole("--save-every", 50, "updates of the Bayesian network between checkpoints")


def run(args: argparse.Namespace) -> None:
    """Train and compare both networks for every seed; write the results."""
    start = time.perf_counter()
    out = run_folder(args)
    digits = data.load()
    plain, bayesian = digits_training.plain(args, digits), digits_training.bayesian(args, digits)
    turned, label = _turned(digits)
    images = np.concatenate([digits.test.images, digits.validation.images, turned])
    programs = _compile(args, plain, bayesian, len(images))
    # The two cheap predictors also see all rotated test images.
    every = np.concatenate([images, *(_turn(digits.test.images, a, digits) for a in TEST_ANGLES)])
    # All plain networks first, while the Bayesian program is compiled.
    seeds = range(args.seed, args.seed + args.seeds)
    plains = [digits_training.train_plain(args, plain, programs.plain, seed) for seed in seeds]
    starts = {seed: plain.network(means) for seed, (means, _) in zip(seeds, plains, strict=True)}
    bayesians = digits_training.train_bayesian(args, bayesian, programs.bayesian, starts)
    records = []
    for seed, (means, plain_seconds), (params, seconds) in zip(
        seeds, plains, bayesians, strict=True
    ):
        results, sweeps, each = _predict(args, programs, seed, (means, params), images, every)
        records.append({
            "seconds": {"plain": plain_seconds, "bayesian": seconds},
            "kl": float(bayesian.network(params).kl()),
            **_compare(digits, results),
            "rotation": _rotation(digits, sweeps),
            "catch_up": _catch_up(digits, results, each),
        })  # fmt: skip
        if seed == args.seed:
            _draw(out, digits, turned, label, results)
    caught = [record.pop("catch_up") for record in records]
    metrics = {
        "settings": vars(args),
        "angles": TEST_ANGLES.tolist(),
        **over_seeds(records),
        "catch_up": caught,
        "seeds": records,
    }
    figures.save(figures.doubt(TEST_ANGLES, metrics["rotation"]), out / "doubt.png")
    metrics["seconds"]["total"] = time.perf_counter() - start
    write_json(out / "metrics.json", metrics)
    _print(out, metrics)


class Programs(NamedTuple):
    """Compiled programs for all seeds; each function waits for its programs."""

    plain: Callable[[], Compiled]
    bayesian: Callable[[], Compiled]
    predictors: Callable[[], tuple[Any, Any, Any]]  # of the plain, the analytic, the drawn networks


def _compile(
    args: argparse.Namespace, plain: Training, bayesian: Training, num_drawn: int
) -> Programs:
    """Compile in the background: the plain training, and beside it the others, in the order of use."""

    def predictors() -> tuple[Any, Any, Any]:
        key = jax.random.key(0)
        graph, _ = nnx.split(bayesian.network(bayesian.params))
        drawn = predictions.drawn(graph, args.samples)
        size = predictions.CHUNK
        return (
            predictions.compiled(predictions.plain(plain.graph), plain.params, size),
            predictions.compiled(predictions.analytic(graph), bayesian.params, size),
            predictions.compiled(drawn, bayesian.params, num_drawn, key),
        )

    first, second = Background(), Background()
    return Programs(
        first.start(plain.compile), second.start(bayesian.compile), second.start(predictors)
    )


def _turned(digits: Digits) -> tuple[np.ndarray, int]:
    """One test image at every angle, and its label."""
    image = digits.test.images[np.flatnonzero(digits.test.labels == TURNED_DIGIT)[0]]
    turned = np.concatenate([_turn(image[None], angle, digits) for angle in ANGLES])
    return turned, TURNED_DIGIT


def _turn(images: np.ndarray, angle: float, digits: Digits) -> np.ndarray:
    """Images (N, 8, 8), rotated by `angle` degrees; new corners are empty."""
    options = {"axes": (2, 1), "reshape": False, "order": 1, "cval": digits.background}
    return np.asarray(ndimage.rotate(images, angle, **options), np.float32)


def _predict(
    args: argparse.Namespace,
    programs: Programs,
    seed: int,
    params: tuple[Any, Any],
    images: np.ndarray,
    every: np.ndarray,
) -> tuple[dict[str, Prediction], dict[str, Prediction], np.ndarray]:
    """Predictions for `images`, the two cheap ones' for the rest of `every`, and each drawn network's.

    The last are class probabilities (samples, N, C).
    """
    plain, analytic, drawn = programs.predictors()
    both = {
        "plain network": predictions.in_chunks(plain, params[0], every),
        "Bayesian, analytic": predictions.in_chunks(analytic, params[1], every),
    }
    key = jax.random.key(seed + 2)
    sampled, each = predictions.sampled(drawn, params[1], images, key)
    results = {name: result.at(slice(len(images))) for name, result in both.items()}
    results[f"Bayesian, {args.samples:,} samples"] = sampled
    return results, {n: result.at(slice(len(images), None)) for n, result in both.items()}, each


def _rotation(digits: Digits, sweeps: dict[str, Prediction]) -> dict[str, dict[str, list[float]]]:
    """Mean accuracy, NLL and entropy over the test images, by the angle."""
    curves = {}
    for name, result in sweeps.items():
        parts = np.split(result.probabilities, len(TEST_ANGLES))
        scores = [predictions.scores(part, digits.test.labels) for part in parts]
        curves[name] = {
            "accuracy": [score["accuracy"] for score in scores],
            "nll": [score["nll"] for score in scores],
            "entropy": [float(predictions.entropy(part).mean()) for part in parts],
        }
    return curves


def _catch_up(digits: Digits, results: dict[str, Prediction], each: np.ndarray) -> CaughtUp:
    """How many drawn networks match the analytic pass on the test images."""
    _, analytic, samples = (result.at(_parts(digits)[0]) for result in results.values())
    of_one = samples.seconds_per_image / len(each) / analytic.seconds_per_image
    labels = digits.test.labels
    return predictions.catch_up(each[:, : len(labels)], labels, analytic.probabilities, of_one)


def _compare(digits: Digits, results: dict[str, Prediction]) -> dict[str, Any]:
    """Scores of all three on the test images, and how the analytic logits agree with sampled ones."""
    test, validation, _ = _parts(digits)
    _, analytic, samples = (result.at(test) for result in results.values())
    agreement = mj.reference.Agreement.of(
        analytic.logit_mean, analytic.logit_sd, samples.logit_mean, samples.logit_sd
    )
    return {
        "test": _scores(results, test, digits.test.labels),
        "validation": _scores(results, validation, digits.validation.labels),
        "logits": agreement._asdict(),
    }


def _parts(digits: Digits) -> tuple[slice, slice, slice]:
    """Slices of the predictions: test images, validation images, the rotated digit."""
    first = len(digits.test.labels)
    second = first + len(digits.validation.labels)
    return slice(first), slice(first, second), slice(second, None)


def _scores(
    results: dict[str, Prediction], part: slice, labels: np.ndarray
) -> dict[str, dict[str, float]]:
    return {
        name: {
            **predictions.scores(result.at(part).probabilities, labels),
            "seconds_per_image": result.seconds_per_image,
        }
        for name, result in results.items()
    }


def _draw(
    out: Path, digits: Digits, turned: np.ndarray, label: int, results: dict[str, Prediction]
) -> None:
    test, _, sweep = _parts(digits)
    plain, analytic, samples = (result.at(test) for result in results.values())
    both = {"plain": plain, "Bayesian, analytic": analytic}
    figures.save(figures.reliability(both, digits.test.labels), out / "reliability.png")
    figures.save(figures.spread(analytic, samples), out / "spread.png")
    _, analytic, samples = (result.at(sweep) for result in results.values())
    figure = figures.rotation(ANGLES, turned, analytic, samples, label)
    figures.save(figure, out / "rotation.png")


def _print(out: Path, metrics: dict[str, Any]) -> None:
    logits, settings = metrics["logits"], metrics["settings"]
    shown = [metrics["angles"].index(angle) for angle in SHOWN_ANGLES]
    turned = {name: [c["nll"][i] for i in shown] for name, c in metrics["rotation"].items()}
    heads = [f"NLL at {angle:.0f}°" for angle in SHOWN_ANGLES]
    print(report.scores_table(metrics["test"], heads, turned))
    print(
        f"analytic against sampled: logit sd ratio {report.with_error(logits['sd_ratio'], '.3f')}, "
        f"correlation {logits['sd_correlation']['mean']:.3f}, mean error "
        f"{logits['mean_error']['mean']:.3f} sd; the analytic NLL is reached by sampled networks: "
        + ", ".join(found.said(settings["samples"]) for found in metrics["catch_up"])
    )
    print(f"{settings['seeds']} seeds from {settings['seed']}; KL weight {settings['kl_weight']:g}; "
          f"{metrics['seconds']['total']:.0f} s in all; figures and metrics.json in {out}")  # fmt: skip
