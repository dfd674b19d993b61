"""The figure of the frontier: error over cost for every structure and network."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.figures import STYLE, plt, save

__all__ = ["error_over_cost", "save"]

COLOURS = ("#c8442f", "#d1852b", "#7b5ea7", "#2b6cb0", "#2a9d5c", "#555555")


def error_over_cost(records: list[dict[str, Any]]) -> Figure:
    """Relative sd error against the time of a pass in plain forwards, at the tokens and the logits.

    The line is Monte Carlo: N Gaussian samples cost N plain forwards and err by 1 / sqrt(2 (N - 1)).
    """
    measured = [record for record in records if record["status"] == "ok"]
    structures = list(dict.fromkeys(record["structure"] for record in measured))
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(9.6, 4.4), sharey=True)
        for axes, output in zip(panels, ("tokens", "logits"), strict=True):
            samples = np.geomspace(2, 3000, 60)
            axes.plot(samples, 1 / np.sqrt(2 * (samples - 1)), color="0.6", linewidth=1.2)
            for i, structure in enumerate(structures):
                for trained, marker in ((False, "o"), (True, "^")):
                    points = [
                        (record["cost"]["forward"]["time_ratio"], record[output]["rms_sd_error"])
                        for record in measured
                        if record["structure"] == structure
                        and record["network"].startswith("trained") == trained
                    ]
                    axes.plot(
                        *np.array(points).reshape(-1, 2).T,
                        marker,
                        color=COLOURS[i % len(COLOURS)],
                        markersize=5,
                        alpha=0.8,
                        markeredgewidth=0,
                        label=structure if not trained else None,
                    )
            axes.set(xscale="log", yscale="log", title=f"at the {output}")
            axes.set_xlabel("time over that of a plain forward")
        panels[0].set_ylabel("relative error of the sd (rms)")
        panels[0].legend(loc="lower left")
        panels[1].set_title("circles: random, triangles: trained; line: Monte Carlo", loc="right",
                            color="0.4", fontsize=7)  # fmt: skip
    return figure
