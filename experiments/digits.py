"""Train a Bayesian vision Transformer on handwritten digits by the analytic ELBO.

Compares it with the same plain network, and with networks sampled from the learned posterior.
Writes metrics.json and figures, and prints one table.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from scipy import ndimage

import moment_jax as mj
from experiments import classifiers, data, figures, predictions, report
from experiments.checkpoints import Checkpoints, run_folder
from experiments.classifiers import POSTERIORS, Belief
from experiments.command_line import InputError, Parser
from experiments.data import Digits
from experiments.outputs import write_json
from experiments.predictions import Prediction
from experiments.training import fit

__all__ = ["add_arguments", "run", "trained"]

TURNED_DIGIT = 6  # upside down it is a nine
ANGLES = np.linspace(0.0, 180.0, 37)
TEST_ANGLES = np.linspace(0.0, 90.0, 7)  # of all test images


def add_arguments(parser: Parser) -> None:
    """The options of the main job."""
    parser.out("runs/digits")
    parser.resume()
    parser.seed("random seed of weights, batches and samples; never of the split")
    parser.choice(
        "--structure",
        mj.STRUCTURES,
        "Separable",
        "covariance structure (TokenBlock and Full are slow; for Full take --batch-size 4; what has "
        "trained in BatchSeparable predicts in Separable)",
    )
    parser.choice("--posterior", POSTERIORS, "factorized", "family of the beliefs about weights")
    parser.whole("--steps", 600, "updates of the Bayesian network")
    parser.whole("--batch-size", 32, "training images for each update, of both networks")
    parser.real("--learning-rate", 3e-3, "peak of the Bayesian network's cosine schedule")
    parser.real(
        "--kl-weight",
        0.01,
        "final weight of the KL divergence in the ELBO: 1 is Bayes' rule, less a cold posterior",
        least=0,
    )
    parser.whole("--warm-up", 200, "updates in which the weight of the KL rises from 0", least=0)
    parser.whole("--plain-steps", 4000, "updates of the plain network")
    parser.real("--plain-learning-rate", 5e-3, "peak of the plain network's cosine schedule")
    parser.real("--weight-decay", 1e-2, "AdamW weight decay of the plain network", least=0)
    parser.whole("--samples", 1000, "networks sampled from the posterior to compare with", least=2)
    parser.whole("--save-every", 200, "updates of the Bayesian network between checkpoints")


def run(args: argparse.Namespace) -> None:
    """Train both networks, compare them, write what came out."""
    start = time.perf_counter()
    out = run_folder(args)
    digits = data.load()
    plain, plain_seconds = _train_plain(args, digits)
    network, bayesian_seconds = _train_bayesian(args, digits, plain)
    turned, label = _turned(digits)
    results, sweeps = _predict(args, digits, plain, network, turned)
    metrics = {
        "settings": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
        "seconds": {"plain": plain_seconds, "bayesian": bayesian_seconds},
        "kl": float(network.kl()),
        **_compare(digits, results),
        "rotation": {"angles": TEST_ANGLES.tolist(), "networks": _rotation(digits, sweeps)},
    }
    metrics["catch_up"] = _catch_up(args, digits, network, metrics["test"])
    curves = metrics["rotation"]["networks"]
    figures.save(figures.doubt(TEST_ANGLES, curves), out / "doubt.png")
    _draw(out, digits, turned, label, results)
    metrics["seconds"]["total"] = time.perf_counter() - start
    write_json(out / "metrics.json", metrics)
    _print(out, metrics)


def _train_plain(
    args: argparse.Namespace, digits: Digits
) -> tuple[mj.nn.PlainVisionTransformer, float]:
    graph, params = nnx.split(classifiers.plain_network(args.seed))
    options: dict[str, Any] = {
        "num_steps": args.plain_steps,
        "batch_size": min(args.batch_size, digits.train.labels.size),
        "learning_rate": args.plain_learning_rate,
        "weight_decay": args.weight_decay,
    }
    task = classifiers.plain_task(graph, digits, **options)
    start = time.perf_counter()
    settings = {"seed": args.seed, **options}
    with Checkpoints(args.out / "checkpoints" / "plain", settings, resume=args.resume) as store:
        # Its updates are so cheap that half a run is all that a checkpoint is worth.
        state = fit(
            task, task.start(params, jax.random.key(args.seed)), store, args.plain_steps // 2
        )
    assert state.best is not None
    return nnx.merge(graph, state.best.params), time.perf_counter() - start


def _train_bayesian(
    args: argparse.Namespace, digits: Digits, plain: mj.nn.PlainVisionTransformer
) -> tuple[mj.nn.VisionTransformer, float]:
    """Start at the trained plain network's weights, with small spreads, and maximise the ELBO."""
    belief = Belief(args.structure, args.posterior)
    network = classifiers.bayesian_network(belief, args.seed)
    network.load(plain)
    graph, params = nnx.split(network)
    options = _options(args, digits)
    task = classifiers.bayesian_task(graph, digits, **options)
    start = time.perf_counter()
    with _bayesian_checkpoints(args, options, resume=args.resume) as store:
        key = jax.random.key(args.seed + 1)
        state = fit(task, task.start(params, key), store, args.save_every)
    return _predicting(nnx.merge(graph, state.params)), time.perf_counter() - start


def _predicting(network: mj.nn.VisionTransformer) -> mj.nn.VisionTransformer:
    """What is said of an image depends on no other, whatever the batches of the training shared."""
    shared = network.settings.structure is mj.BatchSeparable
    return mj.nn.with_structure(network, mj.Separable) if shared else network


def _options(args: argparse.Namespace, digits: Digits) -> dict[str, Any]:
    return {
        "num_steps": args.steps,
        "batch_size": min(args.batch_size, digits.train.labels.size),
        "learning_rate": args.learning_rate,
        "kl_weight": args.kl_weight,
        "warm_up_steps": args.warm_up,
    }


def _bayesian_checkpoints(
    args: argparse.Namespace, options: dict[str, Any], *, resume: bool
) -> Checkpoints:
    settings = {
        "seed": args.seed, "structure": args.structure, "posterior": args.posterior,
        "plain_steps": args.plain_steps, **options,
    }  # fmt: skip
    return Checkpoints(args.out / "checkpoints" / "bayesian", settings, resume=resume)


def trained(run_folder: Path) -> tuple[mj.nn.VisionTransformer, Digits]:
    """The Bayesian network that a finished run of the main job has left in its --out, and its data.

    Raises:
      InputError: if there is none.
    """
    try:
        stored = json.loads((run_folder / "metrics.json").read_text())["settings"]
        args = argparse.Namespace(**{**stored, "out": run_folder})
        digits = data.load()
        options = _options(args, digits)
        network = classifiers.bayesian_network(Belief(args.structure, args.posterior), args.seed)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(
            f"{run_folder} holds no finished run of the main job ({error}); make one by "
            f"python -m experiments digits --out {run_folder}"
        ) from error
    graph, params = nnx.split(network)
    task = classifiers.bayesian_task(graph, digits, **options)
    with _bayesian_checkpoints(args, options, resume=True) as store:
        state = store.restore(task.start(params, jax.random.key(args.seed + 1)))
    if state is None:
        raise InputError(f"{run_folder} holds no checkpoint; run the main job into it again")
    return _predicting(nnx.merge(graph, state.params)), digits


def _turned(digits: Digits) -> tuple[np.ndarray, int]:
    """One test image at every angle of the sweep."""
    image = digits.test.images[np.flatnonzero(digits.test.labels == TURNED_DIGIT)[0]]
    turned = np.concatenate([_turn(image[None], angle, digits) for angle in ANGLES])
    return turned, TURNED_DIGIT


def _turn(images: np.ndarray, angle: float, digits: Digits) -> np.ndarray:
    """Images (N, 8, 8), turned by `angle` degrees; what comes into view is empty."""
    options = {"axes": (2, 1), "reshape": False, "order": 1, "cval": digits.background}
    return np.asarray(ndimage.rotate(images, angle, **options), np.float32)


def _predict(
    args: argparse.Namespace,
    digits: Digits,
    plain: mj.nn.PlainVisionTransformer,
    network: mj.nn.VisionTransformer,
    turned: np.ndarray,
) -> tuple[dict[str, Prediction], dict[str, Prediction]]:
    """Every predictor's word on the test and the validation images and on the turned digit.

    And that of the two that are cheap enough on all test images, turned by every one of TEST_ANGLES.
    """
    images = np.concatenate([digits.test.images, digits.validation.images, turned])
    count = len(images)
    # One call for all: a predictor is compiled once.
    every = [images, *(_turn(digits.test.images, angle, digits) for angle in TEST_ANGLES)]
    both = {
        "plain network": predictions.plain(plain, np.concatenate(every)),
        "Bayesian, analytic": predictions.analytic(network, np.concatenate(every)),
    }
    key = jax.random.key(args.seed + 2)
    results = {name: result.at(slice(count)) for name, result in both.items()}
    results[f"Bayesian, {args.samples:,} samples"] = predictions.sampled(
        network, images, key, args.samples
    )
    return results, {name: result.at(slice(count, None)) for name, result in both.items()}


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


def _catch_up(
    args: argparse.Namespace,
    digits: Digits,
    network: mj.nn.VisionTransformer,
    networks: dict[str, dict[str, float]],
) -> dict[str, float | None]:
    """How many sampled networks are as good as the analytic pass, and what they cost beside it."""
    _, analytic, samples = networks.values()
    key = jax.random.key(args.seed + 3)
    images, labels = digits.test
    count = predictions.catch_up(network, images, labels, key, args.samples, analytic["nll"])
    of_one = samples["seconds_per_image"] / args.samples / analytic["seconds_per_image"]
    return {"samples": count, "time_ratio": None if count is None else count * of_one}


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
    """Where the test images, the validation images and the turned digit are among the predictions."""
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
    figures.save(figures.certainty(digits.test, analytic, samples), out / "certainty.png")
    both = {"plain": plain, "Bayesian, analytic": analytic}
    figures.save(figures.reliability(both, digits.test.labels), out / "reliability.png")
    figures.save(figures.spread(analytic, samples), out / "spread.png")
    _, analytic, samples = (result.at(sweep) for result in results.values())
    figure = figures.rotation(ANGLES, turned, analytic, samples, label)
    figures.save(figure, out / "rotation.png")


def _print(out: Path, metrics: dict[str, Any]) -> None:
    networks, logits = metrics["test"], metrics["logits"]
    print(report.scores_table(networks))
    _, analytic, samples = networks.values()
    gap = analytic["nll"] - samples["nll"]
    print(
        f"analytic against sampled: NLL {gap:+.4f}; logit sd ratio {logits['sd_ratio']:.3f}, "
        f"correlation {logits['sd_correlation']:.3f}, mean error {logits['mean_error']:.3f} sd"
    )
    print(_caught_up(metrics))
    for name, curve in metrics["rotation"]["networks"].items():
        for angle in (45.0, 60.0):
            i = metrics["rotation"]["angles"].index(angle)
            print(
                f"test images turned by {angle:.0f} degrees, {name}: accuracy "
                f"{curve['accuracy'][i]:.3f}, NLL {curve['nll'][i]:.2f}, "
                f"entropy {curve['entropy'][i]:.2f}"
            )
    print(f"KL weight {metrics['settings']['kl_weight']:g}; "
          f"{metrics['seconds']['total']:.0f} s in all; figures and metrics.json in {out}")  # fmt: skip


def _caught_up(metrics: dict[str, Any]) -> str:
    found, most = metrics["catch_up"], metrics["settings"]["samples"]
    if found["samples"] is None:
        return f"up to {most:,} sampled networks do not reach the analytic NLL"
    return (
        f"{found['samples']:,} sampled networks reach the analytic NLL, in "
        f"{found['time_ratio']:.2g} times its time"
    )
