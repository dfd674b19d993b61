"""The command line of the resilience experiment."""

from __future__ import annotations

import argparse
from pathlib import Path

import moment_jax as mj
from experiments.command_line import number, one_of, path
from experiments.common_options import add_json, add_seed
from experiments.loop.job import PRECISIONS
from experiments.resilience_job import NETWORKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the experiment."""
    _add_training(parser)
    _add_machines(parser)
    _add_saving(parser)
    parser.add_argument(
        "--check",
        type=number(int, least=1),
        metavar="KILLS",
        help="train undisturbed, then again with so many SIGKILLs at random moments (a worker, the "
        "coordinator, all workers, the supervisor, everything; while starting, training and saving) and "
        "one SIGTERM, and compare bit for bit; --out has to be empty",
    )
    parser.add_argument(
        "--topologies",
        action="store_true",
        help="train undisturbed, then half on 4 devices and half on 1, and half on 2 x 2 and half on "
        "1 x 4, and compare; --out has to be empty",
    )
    add_json(parser)


def _add_training(parser: argparse.ArgumentParser) -> None:
    count = number(int, least=1)
    add = parser.add_argument
    add_seed(parser, "random seed of weights, order, noise, and moments of kills")
    add("--steps", type=count, default=200, metavar="N", help="updates (default: %(default)s)")
    add(
        "--structure",
        type=one_of(mj.STRUCTURES, "structure"),
        default="Diagonal",
        metavar="NAME",
        help=f"covariance structure: {', '.join(mj.STRUCTURES)} (default: %(default)s)",
    )
    add(
        "--network",
        type=one_of(NETWORKS, "network"),
        default="transformer",
        metavar="NAME",
        help=f"one of {', '.join(NETWORKS)}; an MLP starts faster (default: %(default)s)",
    )
    add(
        "--blocks",
        type=count,
        default=1,
        metavar="N",
        help="blocks, or hidden layers (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=count,
        default=32,
        metavar="N",
        help="images for each update, over all devices (default: %(default)s)",
    )
    add(
        "--accumulate",
        type=count,
        default=1,
        metavar="N",
        help="parts of a batch whose gradients are averaged, one after the other (default: %(default)s)",
    )
    add(
        "--learning-rate",
        type=number(float, above=0),
        default=3e-3,
        metavar="X",
        help="peak of the cosine schedule (default: %(default)s)",
    )
    add(
        "--precision",
        type=one_of(PRECISIONS, "precision"),
        default="float32",
        metavar="NAME",
        help=f"of products of matrices on accelerators: {', '.join(PRECISIONS)}; moments, parameters "
        "and optimiser stay in float32; CPUs multiply in float32 whatever is asked (default: "
        "%(default)s)",
    )


def _add_machines(parser: argparse.ArgumentParser) -> None:
    count = number(int, least=1)
    add = parser.add_argument
    add("--processes", type=count, default=2, metavar="N", help="processes (default: %(default)s)")
    add(
        "--devices",
        type=count,
        default=2,
        metavar="N",
        help="devices of each process (default: %(default)s); on CPU, which is taken unless "
        "JAX_PLATFORMS says otherwise, they are virtual",
    )
    add(
        "--data",
        type=count,
        metavar="N",
        help="devices along which batches and rows of parameters are split (default: all)",
    )
    add(
        "--model",
        type=count,
        default=1,
        metavar="N",
        help="devices along which heads and hidden units are split (default: %(default)s)",
    )
    add(
        "--fsdp",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="split parameters and optimiser over --data too: less memory, more messages",
    )


def _add_saving(parser: argparse.ArgumentParser) -> None:
    count = number(int, least=1)
    add = parser.add_argument
    add(
        "--out",
        type=path,
        default=Path("runs/resilience"),
        metavar="DIR",
        help="folder of the run (default: %(default)s). A checkpoint in it is gone on from, by any "
        "processes and devices; one of another model, other settings or another version is refused",
    )
    add(
        "--save-every",
        type=count,
        default=50,
        metavar="N",
        help="updates between checkpoints (default: %(default)s)",
    )
    add(
        "--stop-at",
        type=count,
        metavar="N",
        help="save and leave after this update, with the exit status 75",
    )
    add(
        "--restarts",
        type=number(int, least=0),
        default=3,
        metavar="N",
        help="how often all processes are started again after one is lost (default: %(default)s)",
    )
    add(
        "--grace",
        type=number(float, above=0),
        default=30.0,
        metavar="SECONDS",
        help="after SIGTERM: time to save before the processes are killed (default: %(default)s)",
    )
    add(
        "--any-version",
        action="store_true",
        help="go on from a checkpoint of another version of moment_jax or jax; not bit for bit",
    )
    add(
        "--compile-cache",
        type=path,
        metavar="DIR",
        help="keep compiled programs there, for faster starts; what is in it is executed, so only you "
        "should be able to write there (default: nowhere)",
    )
