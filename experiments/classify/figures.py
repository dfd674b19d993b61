"""The figures of the comparison."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from experiments.figures import STYLE, plt

UNITS = {"angle": "angle (degrees)", "blur": "sd of the blur (eighths of the side)"}


def shifts(curves: dict[str, dict[str, dict[str, dict[float, dict[str, float]]]]]) -> Figure:
    """NLL, ECE and accuracy against the strength of a shift, mean and standard error over seeds.

    `curves[shift][method][score][strength]` has "mean" and "error".
    """
    scores = ("accuracy", "nll", "ece")
    with plt.rc_context(STYLE):
        figure, rows = plt.subplots(len(curves), 3, figsize=(10, 3 * len(curves)), squeeze=False)
        for axes, (shift, methods) in zip(rows, curves.items(), strict=True):
            for axis, score in zip(axes, scores, strict=True):
                for name, found in methods.items():
                    strengths = list(found[score])
                    mean = [found[score][s]["mean"] for s in strengths]
                    error = np.nan_to_num([found[score][s]["error"] for s in strengths])
                    axis.errorbar(strengths, mean, error, marker="o", markersize=3, label=name)
                axis.set(
                    xlabel=UNITS[shift], ylabel=score.upper() if score != "accuracy" else score
                )
        rows[0, 0].legend(fontsize=6)
    return figure


def rejection(curves: dict[str, np.ndarray]) -> Figure:
    """Risk against coverage, the mean over seeds (L, N) of each method."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(5, 3.6))
        for name, curve in curves.items():
            coverage = np.arange(1, curve.shape[1] + 1) / curve.shape[1]
            axis.plot(coverage, curve.mean(axis=0), label=name)
        axis.set(xlabel="coverage: share of images answered", ylabel="wrong among them")
        axis.legend(fontsize=6)
    return figure


def histograms(entropies: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Entropy of the prediction on test examples and on others: `entropies[method][examples]`."""
    top = max(np.max(values) for given in entropies.values() for values in given.values())
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(entropies), figsize=(2.6 * len(entropies), 2.6), sharey=True, squeeze=False
        )
        for axis, (name, given) in zip(axes[0], entropies.items(), strict=True):
            for which, values in given.items():
                axis.hist(values, bins=np.linspace(0, top, 24), density=True,
                          histtype="step", label=which)  # fmt: skip
            axis.set(title=name, xlabel="entropy (nats)")
        axes[0, 0].legend(fontsize=6)
    return figure
