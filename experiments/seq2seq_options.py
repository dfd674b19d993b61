"""The command line of the forecasts."""

from __future__ import annotations

import argparse
from pathlib import Path

import moment_jax as mj
from experiments.command_line import number, one_of, path
from experiments.common_options import add_seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the experiment."""
    add, count, positive = parser.add_argument, number(int, least=1), number(float, above=0)
    add(
        "--out",
        type=path,
        default=Path("runs/seq2seq"),
        metavar="DIR",
        help="folder for metrics.json, figures and checkpoints (default: %(default)s)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --out, with the same other options; without it, an "
        "earlier run's checkpoints there are replaced",
    )
    add_seed(parser, "random seed of weights, batches and samples; never of the split")
    add(
        "--structure",
        type=one_of(mj.STRUCTURES, "structure"),
        default="Diagonal",
        metavar="NAME",
        help=f"covariance structure: {', '.join(mj.STRUCTURES)} (default: %(default)s, the fastest)",
    )
    add(
        "--steps",
        type=count,
        default=600,
        metavar="N",
        help="updates (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=count,
        default=32,
        metavar="N",
        help="training windows for each update (default: %(default)s)",
    )
    add(
        "--learning-rate",
        type=positive,
        default=3e-3,
        metavar="X",
        help="peak of the cosine schedule (default: %(default)s)",
    )
    add(
        "--kl-weight",
        type=number(float, least=0),
        default=4.0,
        metavar="X",
        help="final weight of the KL divergence against all windows; they overlap, so 24 would count "
        "each hour once (default: %(default)s)",
    )
    add(
        "--samples",
        type=number(int, least=2),
        default=200,
        metavar="N",
        help="networks sampled from the posterior to judge the analytic moments by (default: "
        "%(default)s)",
    )
    add(
        "--save-every",
        type=count,
        default=250,
        metavar="N",
        help="updates between checkpoints (default: %(default)s)",
    )
