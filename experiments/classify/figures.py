"""The figure of the comparison."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from experiments.figures import STYLE, plt

SCORES = ("accuracy", "nll", "ece")


def rotation(methods: dict[str, dict[float, dict[str, dict[str, float]]]]) -> Figure:
    """Scores against the angle: `methods[name][angle][score]` has "mean" and "error" over seeds."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(SCORES), figsize=(10, 3))
        for axis, score in zip(axes, SCORES, strict=True):
            for name, found in methods.items():
                mean, error = ([one[score][k] for one in found.values()] for k in ("mean", "error"))
                line = {"marker": "o", "markersize": 3, "label": name}
                axis.errorbar(list(found), mean, np.nan_to_num(error), **line)
            axis.set(xlabel="angle (degrees)", ylabel=score)
        axes[0].legend(fontsize=6)
    return figure
