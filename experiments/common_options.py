"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

import moment_jax as mj
from experiments.command_line import number, one_of, path


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


def add_run(parser: argparse.ArgumentParser) -> None:
    """`--run DIR`, a trained network."""
    parser.add_argument(
        "--run",
        type=path,
        default=Path("runs/digits"),
        metavar="DIR",
        help="the --out of a finished main job (default: %(default)s)",
    )


def add_seed(parser: argparse.ArgumentParser, what: str = "random seed") -> None:
    """`--seed N`."""
    parser.add_argument(
        "--seed",
        type=number(int, least=0),
        default=0,
        metavar="N",
        help=f"{what} (default: %(default)s)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`."""
    parser.add_argument(
        "--json",
        type=path,
        metavar="FILE",
        help="write the figures there too (default: nowhere)",
    )
