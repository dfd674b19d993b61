"""Tell apart what a covariance structure cannot hold and what a transform gets wrong.

Takes the network of a finished main job and a few test images. After every sublayer it prints, for each
structure: the sd over the sampled sd (mean |ratio - 1| in brackets) of the closure experiment (exact
sampling, but draws replaced by Gaussian ones with what the structure keeps: the best that it can do),
of the library's own pass, and of the library's transform of this sublayer fed with sampled moments.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from experiments.command_line import number
from experiments.common_options import add_json, add_run, add_seed, add_structures
from experiments.digits import trained
from experiments.outputs import writable_file, write_json
from experiments.report import aligned

KINDS = ("closure", "library", "layer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the experiment."""
    add = parser.add_argument
    add_run(parser)
    add_structures(parser)
    add(
        "--images",
        type=number(int, least=1),
        default=2,
        metavar="N",
        help="test images, whose figures are averaged (default: %(default)s)",
    )
    add(
        "--samples",
        type=number(int, least=2),
        default=4000,
        metavar="N",
        help="networks drawn; a sd is then right to 1 / sqrt(2 N) (default: %(default)s)",
    )
    add_seed(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Load the network, run the experiment image by image, print the averages."""
    if args.json is not None:
        writable_file(args.json, "--json")
    network, digits = trained(args.run)
    structures = [mj.STRUCTURES[name] for name in dict.fromkeys(args.structure)]
    reports = [
        mj.reference.closure_report(
            network,
            jnp.asarray(image),
            structures,
            jax.random.fold_in(jax.random.key(args.seed), i),
            args.samples,
        )
        for i, image in enumerate(digits.test.images[: args.images])
    ]
    rows = [_average(same) for same in zip(*reports, strict=True)]
    table = [["stage", "structure", *(f"{kind} sd ratio" for kind in KINDS), "mean error"]]
    for row in rows:
        parts = [getattr(row, kind) for kind in KINDS]
        ratios = [f"{part.sd_ratio:.3f} ({part.sd_error:.3f})" for part in parts]
        table.append([row.stage, row.structure, *ratios, f"{row.library.mean_error:.3f}"])
    print(aligned(table))
    if args.json is not None:
        write_json(args.json, [_record(row) for row in rows])


def _average(rows: tuple[mj.reference.ClosureRow, ...]) -> mj.reference.ClosureRow:
    """The figures of one stage and structure, averaged over the images."""
    figures = (np.mean([getattr(row, kind) for row in rows], axis=0) for kind in KINDS)
    parts = (mj.reference.Agreement(*map(float, mean)) for mean in figures)
    return mj.reference.ClosureRow(rows[0].stage, rows[0].structure, *parts)


def _record(row: mj.reference.ClosureRow) -> dict[str, object]:
    return {
        "stage": row.stage,
        "structure": row.structure,
        **{kind: getattr(row, kind)._asdict() for kind in KINDS},
    }
