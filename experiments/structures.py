"""The option `--structure` of the commands that compare several."""

from __future__ import annotations

import argparse

import moment_jax as mj
from experiments.command_line import one_of


def add_structures(parser: argparse.ArgumentParser) -> None:
    """`--structure NAME ...`, all of them by default."""
    parser.add_argument(
        "--structure",
        type=one_of(mj.STRUCTURES, "structure"),
        nargs="+",
        metavar="NAME",
        default=list(mj.STRUCTURES),
        help=f"covariance structures: {', '.join(mj.STRUCTURES)} (default: all)",
    )
