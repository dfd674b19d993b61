"""The command line of the language experiment."""

from __future__ import annotations

import argparse
from pathlib import Path

import moment_jax as mj
from experiments.command_line import number, one_of, path
from experiments.common_options import add_seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the language experiment."""
    count, positive, weight = number(int, least=1), number(float, above=0), number(float, least=0)
    parser.add_argument(
        "--out",
        type=path,
        default=Path("runs/language"),
        metavar="DIR",
        help="folder for metrics.json, figures and checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --out, with the same other options; without it, an "
        "earlier run's checkpoints there are replaced",
    )
    add_seed(parser, "random seed of weights, batches and samples; never of the split")
    parser.add_argument(
        "--structure",
        type=one_of(mj.STRUCTURES, "structure"),
        default="Diagonal",
        metavar="NAME",
        help=f"covariance structure: {', '.join(mj.STRUCTURES)} (default: %(default)s, which is exactly "
        "causal; in Separable later characters reach earlier ones a little; others are slow)",
    )
    numbers = (
        ("--steps", count, 150, "N", "updates of the Bayesian network"),
        ("--plain-steps", count, 2000, "N", "updates of the plain network"),
        ("--batch-size", count, 16, "N", "windows for each update, of both networks"),
        ("--learning-rate", positive, 2e-3, "X", "peak of the Bayesian network's schedule"),
        ("--plain-learning-rate", positive, 3e-3, "X", "peak of the plain network's schedule"),
        ("--weight-decay", weight, 1e-2, "X", "AdamW weight decay of the plain network"),
        ("--kl-weight", weight, 0.3, "X", "final weight of the KL: 1 is Bayes' rule, less is cold"),
        ("--warm-up", number(int, least=0), 50, "N", "updates in which the KL's weight rises"),
        ("--samples", number(int, least=2), 10, "N", "sampled networks to compare with"),
        ("--windows", number(int, least=2), 100, "N", "windows of each text to score, at most"),
        ("--save-every", count, 250, "N", "updates of either network between checkpoints"),
    )
    for name, kind, default, metavar, what in numbers:
        parser.add_argument(
            name, type=kind, default=default, metavar=metavar, help=f"{what} (default: %(default)s)"
        )
