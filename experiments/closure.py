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
from typing import Any

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
    rows = jax.tree.map(_average, *reports)
    table = [["stage", "structure", *(f"{kind} sd ratio" for kind in KINDS), "mean error"]]
    for row in rows:
        parts = [getattr(row, kind) for kind in KINDS]
        ratios = [f"{part.sd_ratio:.3f} ({part.sd_error:.3f})" for part in parts]
        table.append([row.stage, row.structure, *ratios, f"{row.library.mean_error:.3f}"])
    print(aligned(table))
    beside = _logits(network, images, keys, args.samples)
    figures = list(beside["library"])
    table = [["logits of", *(figure.replace("_", " ") for figure in figures)]]
    table += [[name, *(f"{row[figure]:.3f}" for figure in figures)] for name, row in beside.items()]
    print("\n" + aligned(table))
    write_json(args.json, {"stages": rows, "logits": beside})


def _average(first: Any, *others: Any) -> Any:
    """Of a figure over the images; names are the same for all."""
    return first if isinstance(first, str) else float(np.mean([first, *others]))


def _logits(
    network: mj.nn.VisionTransformer, images: list[Array], keys: list[Array], num_samples: int
) -> dict[str, dict[str, float]]:
    """How mean and sd of the logits agree with those of sampled networks, averaged over the images."""

    def library(key: Array, image: Array) -> tuple[Array, Array]:
        mean, cov = network(image)
        return mean, jnp.sqrt(jnp.diagonal(cov))

    def linearised(key: Array, image: Array) -> tuple[Array, Array]:
        logits = mj.linearised(lambda params, x: network.network(params)(x))
        mean, cov = logits(network.params, image)
        return mean[0], jnp.sqrt(cov.variance()[0])

    def sampled(count: int) -> Logits:
        def logits(key: Array, image: Array) -> tuple[Array, Array]:
            drawn = mj.monte_carlo(
                lambda draw: network.network(draw)(image), network.params, key, count
            )
            return drawn.mean, drawn.standard_deviation

        return jax.jit(logits)

    truth = sampled(num_samples)
    ways: dict[str, Logits] = {"library": jax.jit(library), "linearised": jax.jit(linearised)}
    ways |= {f"{count} networks": sampled(count) for count in NETWORKS}
    found: list[dict[str, dict[str, float]]] = []
    for image, key in zip(images, keys, strict=True):
        other, true = jax.random.fold_in(key, 1), truth(key, image)

        def run(way: Logits, key: Array = other, image: Array = image) -> tuple[Array, Array]:
            return jax.block_until_ready(way(key, image))

        seconds = interleaved({name: partial(run, way) for name, way in ways.items()}, REPEATS)
        found.append({})
        for name, way in ways.items():
            agreement = mj.reference.Agreement.of(*run(way), *true)
            found[-1][name] = {**agreement._asdict(), "milliseconds": 1e3 * seconds[name]}
    return {
        name: {figure: _average(*(one[name][figure] for one in found)) for figure in own}
        for name, own in found[0].items()
    }
