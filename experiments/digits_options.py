"""The command line of the main job."""

from __future__ import annotations

import argparse
from pathlib import Path

import moment_jax as mj
from experiments.classifiers import POSTERIORS
from experiments.command_line import number, one_of, path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the main job."""
    count, positive = number(int, least=1), number(float, above=0)
    add = parser.add_argument
    add(
        "--out",
        type=path,
        default=Path("runs/digits"),
        metavar="DIR",
        help="folder for metrics.json, figures and checkpoints (default: %(default)s)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --out, with the same other options; without it, an "
        "earlier run's checkpoints there are replaced",
    )
    add(
        "--seed",
        type=number(int, least=0),
        default=0,
        metavar="N",
        help="random seed of weights, batches and samples; never of the split (default: %(default)s)",
    )
    add(
        "--structure",
        type=one_of(mj.STRUCTURES, "structure"),
        default="Separable",
        metavar="NAME",
        help=f"covariance structure: {', '.join(mj.STRUCTURES)} (default: "
        "%(default)s); TokenBlock and Full are slow, for Full take --batch-size 4",
    )
    add(
        "--posterior",
        type=one_of(POSTERIORS, "posterior"),
        default="factorized",
        metavar="NAME",
        help=f"family of the beliefs about weights: {', '.join(POSTERIORS)} (default: %(default)s)",
    )
    add(
        "--steps",
        type=count,
        default=600,
        metavar="N",
        help="updates of the Bayesian network (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=count,
        default=32,
        metavar="N",
        help="training images for each update, of both networks (default: %(default)s)",
    )
    add(
        "--learning-rate",
        type=positive,
        default=3e-3,
        metavar="X",
        help="peak of the Bayesian network's cosine schedule (default: %(default)s)",
    )
    add(
        "--kl-weight",
        type=number(float, least=0),
        default=0.01,
        metavar="X",
        help="final weight of the KL divergence in the ELBO: 1 is Bayes' rule, less a cold posterior "
        "(default: %(default)s)",
    )
    add(
        "--warm-up",
        type=number(int, least=0),
        default=200,
        metavar="N",
        help="updates in which the weight of the KL rises from 0 (default: %(default)s)",
    )
    add(
        "--plain-steps",
        type=count,
        default=4000,
        metavar="N",
        help="updates of the plain network (default: %(default)s)",
    )
    add(
        "--plain-learning-rate",
        type=positive,
        default=5e-3,
        metavar="X",
        help="peak of the plain network's cosine schedule (default: %(default)s)",
    )
    add(
        "--weight-decay",
        type=number(float, least=0),
        default=1e-2,
        metavar="X",
        help="AdamW weight decay of the plain network (default: %(default)s)",
    )
    add(
        "--samples",
        type=number(int, least=2),
        default=1000,
        metavar="N",
        help="networks sampled from the posterior to compare with (default: %(default)s)",
    )
    add(
        "--save-every",
        type=count,
        default=200,
        metavar="N",
        help="updates of the Bayesian network between checkpoints (default: %(default)s)",
    )
