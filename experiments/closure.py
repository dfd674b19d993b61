"""Tell apart what a covariance structure cannot hold and what a transform gets wrong.

Takes the network of a finished main job and a few test images. After every sublayer it prints, for each
structure: the sd over the sampled sd (mean |ratio - 1| in brackets) of the closure experiment (exact
sampling, but draws replaced by Gaussian ones with what the structure keeps: the best that it can do),
of the library's own pass, and of the library's transform of this sublayer fed with sampled moments.
What users have without the library (a linearised network, a few sampled ones) is in `frontier`.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from experiments.command_line import Parser
from experiments.digits import trained
from experiments.outputs import writable_file, write_json
from experiments.report import aligned

KINDS = ("closure", "library", "layer")


def add_arguments(parser: Parser) -> None:
    """The options of the experiment."""
    parser.place("--run", "runs/digits", "the --out of a finished main job")
    parser.choice("--structure", mj.STRUCTURES, None, "structures")
    parser.whole("--images", 2, "test images, whose figures are averaged")
    parser.whole("--samples", 4000, "networks drawn; a sd is then right to 1 / sqrt(2 N)", least=2)
    parser.seed()
    parser.json()


def run(args: argparse.Namespace) -> None:
    """Load the network, run the experiment image by image, print the averages."""
    if args.json is not None:
        writable_file(args.json, "--json")
    network, digits = trained(args.run)
    structures = [mj.STRUCTURES[name] for name in dict.fromkeys(args.structure)]
    images = [jnp.asarray(image) for image in digits.test.images[: args.images]]
    keys = [jax.random.fold_in(jax.random.key(args.seed), i) for i in range(len(images))]
    reports = [
        mj.reference.closure_report(network, image, structures, key, args.samples)
        for image, key in zip(images, keys, strict=True)
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
