"""Train an autoencoder of binary digits with categorical codes, its Transformers' weights random.

Compares its negative ELBO on test images, with hard codes, with that of the plain Transformer that it
starts from. Writes metrics.json, and prints one table.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax

from experiments.checkpoints import run_folder
from experiments.command_line import Parser
from experiments.discrete import models, scores
from experiments.discrete.models import Binary
from experiments.discrete.scores import Scores
from experiments.outputs import aligned, write_json
from experiments.training import Task, fit_saved

BAYESIAN, TRANSFORMER = "Bayesian Transformer", "plain Transformer"


def add_arguments(parser: Parser) -> None:
    """The options of the experiment."""
    parser.training("runs/discrete", steps=400, batch_size=64, kl_weight=0.02)
    parser.whole("--plain-steps", 4500, "updates of the plain Transformer before")
    parser.whole("--draws", 20, "draws of the codes of every test image")


def run(args: argparse.Namespace) -> None:
    """Train all networks, score them, write the results."""
    start = time.perf_counter()
    out, images = run_folder(args), models.load()
    networks, validation, seconds = _train(args, images)
    key = jax.random.key(args.seed + 3)
    found = {name: scores.score(n, images.test, key, args.draws) for name, n in networks.items()}
    bayesian = networks[BAYESIAN]
    metrics: dict[str, Any] = {
        "settings": vars(args),
        "images": {name: len(part) for name, part in images._asdict().items()},
        "test": {name: one.summary() for name, one in found.items()},
        "weight_kl_per_training_image": float(bayesian.kl()) / len(images.train),
        "gap_to_plain": _gap(found[TRANSFORMER], found[BAYESIAN]),
        "validation": validation,
        "seconds": {**seconds, "total": time.perf_counter() - start},
    }
    write_json(out / "metrics.json", metrics)
    _print(out, metrics)


def _train(
    args: argparse.Namespace, images: Binary
) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """The networks, their validation scores, and seconds (the Bayesian one's with the plain one's)."""
    networks: dict[str, Any] = {}
    validation: dict[str, float] = {}
    seconds: dict[str, float] = {}
    size = min(args.batch_size, len(images.train))

    def train(network: Any, task: Task, settings: dict[str, Any]) -> Any:
        task = dataclasses.replace(task, settings={**settings, "batch_size": size})
        fitted = fit_saved(task, network, args, task.name.replace(" ", "_"), args.seed)
        networks[task.name], validation[task.name] = fitted[:2]
        seconds[task.name] = fitted.seconds + sum(seconds.values())
        return fitted.model

    training, steps = models.TRANSFORMER, args.plain_steps
    task = models.plain_task(TRANSFORMER, images, training, steps, size)
    plain = train(models.autoencoder(args.seed), task, training._asdict())
    settings = {name: getattr(args, name) for name in ("kl_weight", "structure", "plain_steps")}
    task = models.bayesian_task(BAYESIAN, images, args.steps, size, args.kl_weight)
    train(models.bayesian_autoencoder(plain, args.structure), task, settings)
    return networks, validation, seconds


def _gap(other: Scores, mine: Scores) -> dict[str, float]:
    """By how many nats an image mine is better, and the standard error over the images."""
    gap = other.total - mine.total
    return {"nats": float(gap.mean()), "standard_error": float(gap.std(ddof=1) / len(gap) ** 0.5)}


def _print(out: Path, metrics: dict[str, Any]) -> None:
    rows = [["", "-ELBO (nats)", "reconstruction", "KL of codes", "codes", "perplexity"]]
    for name, row in metrics["test"].items():
        total = f"{row['negative_elbo']:.2f} ± {row['standard_error']:.2f}"
        numbers = [f"{row[key]:.2f}" for key in ("reconstruction", "code_kl")]
        codes = f"{row['codes_per_image']} of {row['num_codes']}"
        rows.append([name, total, *numbers, codes, f"{row['perplexity']:.1f}"])
    gap = metrics["gap_to_plain"]
    print(aligned(rows))
    print(f"better than the plain one by {gap['nats']:.2f} ± {gap['standard_error']:.2f} nats an image; "
          f"KL of the weights, not in the table: {metrics['weight_kl_per_training_image']:.2f} nats for "
          f"each training image; {metrics['seconds']['total']:.0f} s in all; in {out}")  # fmt: skip
