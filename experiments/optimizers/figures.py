"""Loss against steps and against seconds, one line for each method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.figures import STYLE, save
from experiments.optimizers.runs import Course

COLOURS = {
    "adam": "#7a828a",
    "adamw": "#4d5358",
    "muon": "#d1852b",
    "cg_fac": "#2b6cb0",
    "kfac": "#2a9d5c",
    "kfac_eigh": "#b23a48",
}


def draw(path: Path, name: str, record: dict[str, Any], courses: dict[str, list[Course]]) -> None:
    """Medians over seeds as lines, the range as a band."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
        for method, each in courses.items():
            losses = np.stack([course.losses for course in each])
            seconds = record["methods"][method]["seconds_per_step"]
            steps = np.arange(1, losses.shape[1] + 1)
            for axis, scale in zip(axes, (1.0, seconds), strict=True):
                colour = COLOURS[method]
                axis.plot(
                    steps * scale, np.median(losses, axis=0), color=colour, label=method, lw=1.2
                )
                axis.fill_between(
                    steps * scale,
                    losses.min(axis=0),
                    losses.max(axis=0),
                    color=colour,
                    alpha=0.15,
                    lw=0,
                )
        for axis, label in zip(axes, ("update", "seconds"), strict=True):
            axis.axhline(record["target"], color="0.6", lw=0.8, ls=":")
            axis.set(xlabel=label, xscale="log")
        if min(row["last_loss"] for row in record["methods"].values()) > 0:
            axes[0].set_yscale("log")
        axes[0].set(ylabel="loss", title=name)
        axes[0].legend()
        save(figure, path)
