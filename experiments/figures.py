"""The figures of the main job, and what the figures of all experiments share."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments import predictions
from experiments.agreement import Agreement
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


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically, and close it."""
    with whole_file(path) as temporary:
        figure.savefig(temporary)
    plt.close(figure)


styled = plt.rc_context(STYLE)
"""Decorator of functions that draw."""


@styled
def doubt(analytic: Prediction, images: Images) -> Figure:
    """The surest test image of each class, and those of which the network is least sure."""
    said, every = analytic.probabilities.argmax(axis=1), predictions.entropy(analytic.probabilities)
    order = np.argsort(every)
    surest = [order[said[order] == k][:1] for k in np.unique(said)]
    rows = {"surest": np.concatenate(surest), "least sure": order[-len(surest) :]}
    figure, axes = plt.subplots(2, len(surest), figsize=(0.85 * len(surest), 2.9), squeeze=False)
    figure.suptitle("the two likeliest classes and their probabilities; wrong in red", fontsize=8)
    for row, (title, chosen) in zip(axes, rows.items(), strict=True):
        row[0].set_ylabel(title)
        for axis, i in zip(row, chosen, strict=True):
            axis.imshow(images.images[i], cmap="gray_r")
            axis.set(xticks=[], yticks=[])
            likeliest = np.argsort(-analytic.probabilities[i])[:2]
            text = "\n".join(f"{k}: {analytic.probabilities[i, k]:.2f}" for k in likeliest)
            wrong = likeliest[0] != images.labels[i]
            axis.set_title(text, fontsize=7, color=WRONG if wrong else "0.2")
            axis.set_xlabel(f"it is a {images.labels[i]}" if wrong else "", fontsize=7, color=WRONG)
    return figure


@styled
def together(found: dict[str, Any]) -> Figure:
    """How much worse than by all draws the labels of an image are predicted together, by time.

    The plain networks are far below, and not of this posterior.
    """
    figure, axes = plt.subplots(figsize=(4.8, 4))
    drawn = {name: one for name, one in found.items() if name.isdigit()}
    every = {"sampled networks": drawn, **{k: {k: found[k]} for k in found if k not in drawn}}
    for (name, own), colour in zip(every.items(), ("0.3", BAYES, PLAIN), strict=False):
        time = [1e6 * one["seconds"]["mean"] for one in own.values()]
        mean, error = ([one["above"][k] for one in own.values()] for k in ("mean", "error"))
        line = {"color": colour, "elinewidth": 1, "capsize": 2, "markersize": 4, "label": name}
        axes.errorbar(time, mean, np.nan_to_num(error), fmt="o-", **line)
        for n, x, y in zip(own, time, mean, strict=True):
            if n in drawn:
                axes.annotate(n, (x, y), (3, 4), textcoords="offset points", fontsize=7)
    axes.axhline(0, color="0.6", linewidth=1)
    axes.set(xscale="log", xlabel="time of an image (µs)")
    axes.set_ylabel(f"NLL of {predictions.LABELS} labels, above all draws' (nats)")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1))
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
        ratio = Agreement.of(*one[1:3], *samples[1:3]).sd_ratio
        label = f"{name}: {ratio:.2f} of the sampled sd"
        axes.plot(x, one.logit_sd.ravel(), "o", color=colour, label=label, **points)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), markerscale=2)
    axes.set(xlim=(0, end), ylim=(0, end), aspect="equal")
    times = (duration(one.seconds_per_image) for one in (samples, analytic))
    axes.set_xlabel(f"sd of the logit, sampled networks ({next(times)} an image)")
    axes.set_ylabel(f"sd of the logit, one pass ({next(times)} an image)")
    return figure
