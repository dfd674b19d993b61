"""Separate the error of a covariance structure from the error of a transform.

Takes the network of a finished main job and a few test images. After every sublayer it prints, for each
structure: the sd over the sampled sd (mean |ratio - 1| in brackets) of the closure experiment (exact
sampling, but draws replaced by Gaussian ones with what the structure keeps: the best that it can do),
of the library's own pass, and of the library's transform of this sublayer fed with sampled moments.
A second table holds the logits of the network's own pass beside what users have without it: the network
linearised at the mean weights, and a few sampled networks.
"""

import argparse
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import moment_jax as mj
from experiments.command_line import Parser
from experiments.digits_training import trained
from experiments.outputs import write_json
from experiments.programs import interleaved
from experiments.report import aligned

Logits = Callable[[Array, Array], tuple[Array, Array]]  # key and image -> mean and sd

KINDS = ("closure", "library", "layer")
NETWORKS = (10, 30, 100, 300)
"""Numbers of sampled networks."""
REPEATS = 5
"""Timed runs, of which the median is reported."""


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
    beside = _logits(network, images, keys, args.samples)
    figures = [*mj.reference.Agreement._fields, "milliseconds"]
    table = [["logits of", *(figure.replace("_", " ") for figure in figures)]]
    table += [[name, *(f"{row[figure]:.3f}" for figure in figures)] for name, row in beside.items()]
    print("\n" + aligned(table))
    write_json(args.json, {"stages": [_record(row) for row in rows], "logits": beside})


def _logits(
    network: mj.nn.VisionTransformer, images: list[Array], keys: list[Array], num_samples: int
) -> dict[str, dict[str, float]]:
    """How mean and sd of the logits agree with those of sampled networks, averaged over the images."""
    truth, ways = _sampled(network, num_samples), _ways(network)
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for image, key in zip(images, keys, strict=True):
        true, other = truth(key, image), jax.random.fold_in(key, 1)

        def run(name: str, key: Array = other, image: Array = image) -> tuple[Array, Array]:
            return jax.block_until_ready(ways[name](key, image))

        seconds = interleaved({name: partial(run, name) for name in ways}, REPEATS)
        for name in ways:
            agreement = mj.reference.Agreement.of(*run(name), *true)
            found[name].append([*agreement, 1e3 * seconds[name]])
    fields = [*mj.reference.Agreement._fields, "milliseconds"]
    return {
        name: dict(zip(fields, map(float, np.mean(rows, axis=0)), strict=True))
        for name, rows in found.items()
    }


def _ways(network: mj.nn.VisionTransformer) -> dict[str, Logits]:
    """The library's own pass, the linearised network, and a few sampled networks."""

    def library(key: Array, image: Array) -> tuple[Array, Array]:
        mean, cov = network(image)
        return mean, jnp.sqrt(jnp.diagonal(cov))

    def linearised(key: Array, image: Array) -> tuple[Array, Array]:
        logits = mj.linearised(lambda params, x: network.network(params)(x))
        mean, cov = logits(network.params, image)
        return mean[0], jnp.sqrt(cov.variance()[0])

    ways: dict[str, Logits] = {"library": jax.jit(library), "linearised": jax.jit(linearised)}
    return ways | {f"{count} networks": _sampled(network, count) for count in NETWORKS}


def _sampled(network: mj.nn.VisionTransformer, count: int) -> Logits:
    """So many networks drawn with the key."""

    def logits(key: Array, image: Array) -> tuple[Array, Array]:
        truth = mj.monte_carlo(
            lambda draw: network.network(draw)(image), network.params, key, count
        )
        return truth.mean, truth.standard_deviation

    return jax.jit(logits)


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
