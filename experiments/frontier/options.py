"""The command line of the frontier."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.command_line import number, one_of, path
from experiments.common_options import add_json, add_seed, add_structures
from experiments.frontier.networks import DEFAULT, LARGE, NETWORKS, QUICK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the frontier."""
    add = parser.add_argument
    sets = parser.add_mutually_exclusive_group()
    sets.add_argument(
        "--networks",
        type=one_of(NETWORKS, "network"),
        nargs="+",
        metavar="NAME",
        help=f"networks to measure, see --list (default: {len(DEFAULT)} small and middling ones)",
    )
    sets.add_argument(
        "--quick", action="store_true", help=f"{' and '.join(QUICK)} alone: some minutes"
    )
    sets.add_argument(
        "--large",
        action="store_true",
        help=f"the {len(LARGE)} networks of up to 1,024 tokens, 768 features and 12 blocks: hours",
    )
    add("--list", action="store_true", help="print the networks and stop; nothing is compiled")
    add_structures(parser)
    add(
        "--out",
        type=path,
        default=Path("runs/frontier"),
        metavar="DIR",
        help="folder for frontier.json, frontier.png, trained posteriors and sampled truths; what is "
        "there already is used again (default: %(default)s)",
    )
    add_json(parser)
    add(
        "--samples",
        type=number(int, least=16),
        metavar="N",
        help="networks drawn for the truth; a sd is then right to 1 / sqrt(2 N) (default: 4000, for "
        "large networks fewer)",
    )
    add(
        "--repeats",
        type=number(int, least=1),
        default=10,
        metavar="N",
        help="the most timed runs of each function, interleaved; their medians count, and slow networks "
        "get fewer (default: %(default)s)",
    )
    add_seed(
        parser,
        "random seed of random posteriors and of the truth's samples; a trained network has its own",
    )
    add(
        "--array-limit",
        type=number(float, above=0),
        default=0.3,
        metavar="GIB",
        help="skip a structure where one of its arrays is larger than this, in GiB "
        "(default: %(default)s)",
    )
    add(
        "--memory-limit",
        type=number(float, above=0),
        default=12.0,
        metavar="GIB",
        help="skip a structure whose compiled forward or train step needs more than this, in GiB "
        "(default: %(default)s)",
    )
