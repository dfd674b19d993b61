"""The figures of the main job, and what the figures of all experiments share."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

import moment_jax as mj
from experiments import predictions
from experiments.data import Images
from experiments.outputs import duration, whole_file
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
WRONG, PLAIN, BAYES = "#c8442f", "#d1852b", "#2b6cb0"
LINES = (
    (PLAIN, "-"),
    ("0.3", "--"),
    (BAYES, "-"),
)  # of a plain network, of several, of the Bayesian one
SHOWN, ENDS = 8, ("surest", "least sure")  # images of a row


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
def doubt(analytic: Prediction, images: Images) -> Figure:
    """The test images of which the Bayesian network is surest and least sure."""
    order = np.argsort(predictions.entropy(analytic.probabilities))
    figure, axes = plt.subplots(2, SHOWN, figsize=(0.9 * SHOWN, 2.7))
    figure.suptitle("the two likeliest classes and their probabilities; wrong in red", fontsize=8)
    for row, chosen, title in zip(axes, (order[:SHOWN], order[-SHOWN:]), ENDS, strict=True):
        row[0].set_ylabel(title)
        for axis, i in zip(row, chosen, strict=True):
            likeliest = np.argsort(-analytic.probabilities[i])[:2]
            axis.imshow(images.images[i], cmap="gray_r")
            axis.set(xticks=[], yticks=[])
            said = [f"{k}: {analytic.probabilities[i, k]:.2f}" for k in likeliest]
            wrong = likeliest[0] != images.labels[i]
            axis.set_title("\n".join(said), fontsize=7, color=WRONG if wrong else "0.2")
    return figure


@styled
def risk(curves: dict[str, list[dict[str, float]]]) -> Figure:
    """Share of errors among the surest predictions, against their share of all; means over seeds."""
    figure, axes = plt.subplots(figsize=(4.2, 3.2))
    for (colour, dashes), (name, curve) in zip(LINES, curves.items(), strict=True):
        mean = 100 * np.array([point["mean"] for point in curve])
        kept = 100 * np.arange(1, len(mean) + 1) / len(mean)
        axes.plot(kept, mean, dashes, color=colour, label=name)
    axes.set(xlabel="predictions kept, the surest first (%)", ylabel="of them wrong (%)")
    axes.set(xlim=(50, 100), ylim=(0, None))
    axes.legend(loc="upper left")
    return figure


@styled
def spread(analytic: Prediction, independent: Prediction, samples: Prediction) -> Figure:
    """The sd of every logit by one pass, and with tokens taken as independent, against sampled ones."""
    x = samples.logit_sd.ravel()
    end = 1.05 * max(x.max(), analytic.logit_sd.max())
    figure, axes = plt.subplots(figsize=(4.8, 4.9))
    axes.plot((0, end), (0, end), color="0.6", linewidth=1)
    points = {"markersize": 2.5, "markeredgewidth": 0, "alpha": 0.45}
    named = {
        "one pass of moment_jax": (analytic, BAYES),
        "the same, tokens independent": (independent, PLAIN),
    }
    for name, (one, colour) in reversed(named.items()):
        ratio = mj.reference.Agreement.of(*one[1:3], *samples[1:3]).sd_ratio
        label = f"{name}: {ratio:.2f} of the sampled sd"
        axes.plot(x, one.logit_sd.ravel(), "o", color=colour, label=label, **points)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), markerscale=2)
    axes.set(xlim=(0, end), ylim=(0, end), aspect="equal")
    times = (duration(one.seconds_per_image) for one in (samples, analytic))
    axes.set_xlabel(f"sd of the logit, sampled networks ({next(times)} an image)")
    axes.set_ylabel(f"sd of the logit, one pass ({next(times)} an image)")
    return figure
