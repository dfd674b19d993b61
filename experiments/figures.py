"""The figures of the main job, and what the figures of all experiments share."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

import moment_jax as mj
from experiments.data import NUM_CLASSES
from experiments.outputs import whole_file
from experiments.predictions import Prediction

STYLE = {
    "figure.dpi": 140,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.4",
    "xtick.color": "0.3",
    "ytick.color": "0.3",
    "legend.frameon": False,
}
WRONG, OTHER, PLAIN, BAYES = "#c8442f", "#b9c0c8", "#d1852b", "#2b6cb0"


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically, and close it."""
    with whole_file(path) as temporary:
        figure.savefig(temporary)
    plt.close(figure)


styled = plt.rc_context(STYLE)
"""Decorator of functions that draw."""


@styled
def histograms(panels: dict[str, dict[str, np.ndarray]], unit: str) -> Figure:
    """A panel for each name: how its values are distributed on each set of examples."""
    figure, axes = plt.subplots(1, len(panels), figsize=(2.6 * len(panels), 2.6), squeeze=False)
    for axis, (name, given) in zip(axes[0], panels.items(), strict=True):
        bins = np.linspace(0, max(map(np.max, given.values())), 24)
        for which, values in given.items():
            axis.hist(values, bins, density=True, histtype="step", label=which)
        axis.set(title=name, xlabel=unit)
    axes[0, 0].legend(fontsize=6)
    return figure


@styled
def doubt(angles: np.ndarray, curves: dict[str, dict[str, list[dict[str, float]]]]) -> Figure:
    """Accuracy, NLL and entropy on the rotated test images against the angle, with standard errors."""
    titles = {"accuracy": "accuracy", "nll": "NLL (nats)", "entropy": "entropy (nats)"}
    figure, panels = plt.subplots(1, 3, figsize=(9, 2.8))
    for axes, (score, title) in zip(panels, titles.items(), strict=True):
        for colour, (name, curve) in zip((PLAIN, BAYES), curves.items(), strict=True):
            mean, error = ([point[k] for point in curve[score]] for k in ("mean", "error"))
            line = {"color": colour, "markersize": 3, "capsize": 2, "label": name}
            axes.errorbar(angles, mean, np.nan_to_num(error), fmt="o-", **line)
        axes.set(title=title, xlabel="angle (degrees)", xticks=angles[::2])
        axes.set_ylim(bottom=0)
    # As unsure as a guess between all classes.
    panels[2].axhline(np.log(NUM_CLASSES), color="0.75", linewidth=1, zorder=0)
    panels[1].legend(loc="upper left")
    return figure


@styled
def spread(analytic: Prediction, samples: Prediction) -> Figure:
    """The analytic standard deviation of every logit against that of the sampled networks."""
    agreement = mj.reference.Agreement.of(*analytic[1:3], *samples[1:3])
    x, y = samples.logit_sd, analytic.logit_sd
    ends = 0.9 * min(x.min(), y.min()), 1.05 * max(x.max(), y.max())
    figure, axes = plt.subplots(figsize=(4.8, 4.9))
    axes.plot(ends, ends, color="0.6", linewidth=1)
    top = np.arange(NUM_CLASSES)[None, :] == analytic.probabilities.argmax(axis=1)[:, None]
    points = {"markersize": 2.5, "markeredgewidth": 0, "alpha": 0.45}
    axes.plot(x[~top], y[~top], "o", color=BAYES, label="other classes", **points)
    axes.plot(x[top], y[top], "o", color=PLAIN, label="the predicted class", **points)
    axes.legend(loc="upper left", markerscale=2)
    axes.set(xlim=ends, ylim=ends, aspect="equal")
    axes.set(xlabel="sd of the logit, sampled networks", ylabel="sd of the logit, analytic")
    axes.set_title(
        f"analytic / sampled sd: {agreement.sd_ratio:.2f} on average, "
        f"correlation {agreement.sd_correlation:.2f}"
    )
    return figure
