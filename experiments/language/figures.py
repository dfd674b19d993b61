"""The figures of the language experiment."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.figures import BAYES, OTHER, PLAIN, RIGHT, STYLE, WRONG
from experiments.language.predictions import Scores

COLOURS = (RIGHT, WRONG, PLAIN)  # the test first
Results = dict[str, dict[str, Scores]]  # network -> text -> scores


def uncertainty(results: Results, network: str) -> Figure:
    """How uncertain each window of each text is: epistemic, total, and the surprise itself."""
    parts = {"epistemic": "nats", "total": "nats", "bits": "bits per character"}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.0))
        for axis, (part, unit) in zip(axes, parts.items(), strict=True):
            values = {text: getattr(s, part) for text, s in results[network].items()}
            bins = np.histogram_bin_edges(np.concatenate(list(values.values())), 40)
            for colour, (text, value) in zip(COLOURS, values.items(), strict=True):
                axis.hist(value, bins, density=True, color=colour, alpha=0.55, label=text)
            title = "surprise" if part == "bits" else f"{part} uncertainty"
            axis.set(xlabel=f"{title}, {unit}", yticks=[])
            axis.locator_params(axis="x", nbins=5)
        axes[0].set_ylabel("windows")
        axes[0].legend()
        figure.suptitle(f"{network}: windows of known and of foreign text", fontsize=9)
    return figure


def bits(results: Results) -> Figure:
    """Bits per character of every network on every text, with standard errors over windows."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6.4, 3.2))
        width = 0.8 / len(results)
        for k, (colour, (name, texts)) in enumerate(
            zip((PLAIN, BAYES, OTHER), results.items(), strict=True)
        ):
            places = np.arange(len(texts)) + (k - (len(results) - 1) / 2) * width
            heights = [scores.bits.mean() for scores in texts.values()]
            errors = [s.bits.std() / np.sqrt(len(s.bits)) for s in texts.values()]
            bars = axis.bar(places, heights, width, yerr=errors, color=colour, label=name)
            axis.bar_label(bars, fmt="%.2f", fontsize=7)
        axis.set_xticks(range(len(texts)), list(texts))
        axis.set(ylabel="bits per character")
        axis.legend(loc="upper left")
    return figure
