"""The table and the figures of the discrete autoencoders."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import figures
from experiments.discrete.scores import Coder, Scores
from experiments.figures import STYLE, plt
from experiments.report import aligned

BAYESIAN, TRANSFORMER = "Bayesian Transformer", "plain Transformer"
DENSE = "dense VAE, as many weights"
NUM_SHOWN, GRID_SIDE = 12, 6


def draw(
    out: Path,
    test: np.ndarray,
    coders: dict[str, Coder],
    scores: dict[str, Scores],
    args: argparse.Namespace,
) -> None:
    """Reconstructions of test images, and images from the prior."""
    rows = {"test image": test[:NUM_SHOWN]}
    names = {
        BAYESIAN: "Bayesian\nTransformer",
        TRANSFORMER: "plain\nTransformer",
        DENSE: "dense VAE",
    }
    for name, label in names.items():
        rows[label] = coders[name].shown(*scores[name].decoded)[:NUM_SHOWN]
    variance = np.asarray(coders[BAYESIAN].images(scores[BAYESIAN].decoded[1]))[:NUM_SHOWN]
    rows["sd by weights\n(of the largest)"] = np.sqrt(variance / max(variance.max(), 1e-30))
    title = "Test images through one draw of hard codes: expected pixels"
    figures.save(
        rows_of_images(rows, title, len(rows["test image"])),
        out / "reconstructions.png",
    )
    panels = {
        label.replace("\n", " "): _from_prior(coders[name], scores[name], args.seed + 5)
        for name, label in names.items()
        if name != TRANSFORMER
    }
    title = "Codes drawn from the uniform prior: expected pixels"
    figures.save(grid_of_images(panels, title, GRID_SIDE), out / "samples.png")


def _from_prior(coder: Coder, scores: Scores, seed: int) -> np.ndarray:
    """Images of uniform codes: as many as test images, so that nothing is compiled anew."""
    codes = jax.random.randint(jax.random.key(seed), scores.codes.shape, 0, scores.num_codes)
    return coder.shown(*coder.decode(jax.nn.one_hot(codes, scores.num_codes)))


def print_table(out: Path, metrics: dict[str, Any]) -> None:
    """One row for each network, and what the rows leave out."""
    rows = [["", "-ELBO (nats)", "reconstruction", "KL of codes", "codes", "perplexity", "weights"]]
    for name, row in metrics["test"].items():
        total = f"{row['negative_elbo']:.2f} ± {row['standard_error']:.2f}"
        numbers = [f"{row[key]:.2f}" for key in ("reconstruction", "code_kl")]
        codes = f"{row['codes_per_image']} of {row['num_codes']}"
        used = f"{row['perplexity']:.1f}"
        rows.append([name, total, *numbers, codes, used, f"{row['weights']:,}"])
    print(aligned(rows))
    gap = metrics["gap_to_dense"]
    print(
        f"better than the dense VAE by {gap['nats']:.2f} ± {gap['standard_error']:.2f} nats an image"
    )
    sampled, kl = metrics["sampled_reconstruction"], metrics["weight_kl"]
    print(
        f"reconstruction by sampled networks: {sampled['mean']:.2f} ± {sampled['standard_error']:.2f}; "
        f"KL of the weights: {kl['per_training_image']:.2f} nats for each training image, not in the "
        "table"
    )
    print(f"{metrics['seconds']['total']:.0f} s in all; figures and metrics.json in {out}")


def rows_of_images(rows: dict[str, np.ndarray], title: str, num_columns: int) -> Figure:
    """One row of images (N, size, size) in [0, 1] for each name."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(rows), num_columns, figsize=(0.75 * num_columns + 1.4, 0.8 * len(rows) + 0.5)
        )
        for line, (name, images) in zip(np.atleast_2d(axes), rows.items(), strict=True):
            for place, image in zip(line, images[:num_columns], strict=True):
                _show(place, image)
            line[0].set_ylabel(name, rotation=0, ha="right", va="center")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure


def grid_of_images(panels: dict[str, np.ndarray], title: str, side: int) -> Figure:
    """A square of images (N, size, size) in [0, 1] for each name, side by side."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(3.4 * len(panels), 3.8))
        parts = np.atleast_1d(figure.subfigures(1, len(panels)))
        for part, (name, images) in zip(parts, panels.items(), strict=True):
            part.suptitle(name)
            for place, image in zip(part.subplots(side, side).ravel(), images, strict=False):
                _show(place, image)
        figure.supxlabel(title, fontsize=9)
    return figure


def _show(axes: Axes, image: np.ndarray) -> None:
    axes.imshow(image, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(True)
        side.set_color("0.85")
