"""Figures of autoencoders: what they make of test images, and of codes drawn from the prior."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures import STYLE, plt


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
