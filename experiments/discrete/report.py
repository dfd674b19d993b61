"""The table and the figures of the discrete autoencoders."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import figures
from experiments.discrete import figures as code_figures
from experiments.discrete.scores import Coder, Scores
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
        code_figures.rows_of_images(rows, title, len(rows["test image"])),
        out / "reconstructions.png",
    )
    panels = {
        label.replace("\n", " "): _from_prior(coders[name], scores[name], args.seed + 5)
        for name, label in names.items()
        if name != TRANSFORMER
    }
    title = "Codes drawn from the uniform prior: expected pixels"
    figures.save(code_figures.grid_of_images(panels, title, GRID_SIDE), out / "samples.png")


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
