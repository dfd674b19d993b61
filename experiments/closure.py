"""Separate the error of a covariance structure from the error of a transform.

Takes the network of a finished main job and a few test images. After each of its parts, which are named
by their last operation, it prints, for each structure: the sd over the sampled sd (mean |ratio - 1| in
brackets) of the closure experiment (exact sampling, but draws replaced by Gaussian ones with what the
structure keeps: the best that it can do), of the library's own pass, and of the library's transform of
this part fed with sampled moments.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from experiments import draws
from experiments.command_line import Parser
from experiments.digits import trained
from experiments.outputs import aligned, write_json

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
    network, digits = trained(args.run)
    structures = [mj.STRUCTURES[name] for name in dict.fromkeys(args.structure)]
    images = [jnp.asarray(image) for image in digits.test.images[: args.images]]
    keys = [jax.random.fold_in(jax.random.key(args.seed), i) for i in range(len(images))]
    apply = draws.function_of(network.at_means())
    of_image = mj.propagate(apply, structure=mj.Diagonal, receipt=True)
    reports = []
    for image, key in zip(images, keys, strict=True):
        receipt = of_image(network.beliefs, image)[-1]
        given = receipt, image, structures, key, args.samples
        reports.append(mj.reference.closure_report(*given))
    rows = jax.tree.map(_average, *reports)
    table = [["stage", "structure", *(f"{kind} sd ratio" for kind in KINDS), "mean error"]]
    for row in rows:
        parts = [getattr(row, kind) for kind in KINDS]
        ratios = [f"{part.sd_ratio:.3f} ({part.sd_error:.3f})" for part in parts]
        table.append([row.stage, row.structure, *ratios, f"{row.library.mean_error:.3f}"])
    print(aligned(table))
    write_json(args.json, rows)


def _average(first: Any, *others: Any) -> Any:
    """Of a figure over the images; names are the same for all."""
    return first if isinstance(first, str) else float(np.mean([first, *others]))
