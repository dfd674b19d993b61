"""The figure of the frontier: error over cost for every structure and network."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import moment_jax as mj
from experiments.figures import STYLE, plt, save

__all__ = ["error_over_cost", "save"]

COLOURS = ("#c8442f", "#d1852b", "#7b5ea7", "#2b6cb0", "#2a9d5c", "#1a1a1a")
MARKERS = {False: "o", True: "^"}  # by whether the posterior was trained


def error_over_cost(records: list[dict[str, Any]]) -> Figure:
    """Relative sd error against the time of a pass in plain forwards, at the tokens and the logits.

    The line is Monte Carlo: N Gaussian samples cost N plain forwards and err by 1 / sqrt(2 (N - 1)).
    A point that is not filled is an upper bound, the noise of the sampled truth.
    """
    measured = [record for record in records if record["status"] == "ok"]
    used = {record["structure"] for record in measured}
    colours = {
        name: COLOURS[i % len(COLOURS)] for i, name in enumerate(mj.STRUCTURES) if name in used
    }
    colours |= {name: "#e377c2" for name in used if name == "linearised"}
    colours |= dict.fromkeys(used - set(colours), "0.6")  # sampled networks, near the line
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(9.6, 4.4), sharey=True)
        for axes, output in zip(panels, ("tokens", "logits"), strict=True):
            for record in measured:
                _point(axes, record, output, colours[record["structure"]])
            samples = np.geomspace(2, 3000, 60)
            axes.plot(samples, 1 / np.sqrt(2 * (samples - 1)), color="0.6", linewidth=1.2)
            axes.set(xscale="log", yscale="log")
            axes.set_title(f"at the {output}", loc="left", fontweight="bold")
            axes.set_xlabel("time over that of a plain forward")
        panels[0].set_ylabel("relative error of the sd (rms)")
        kinds = {"random": MARKERS[False], "trained": MARKERS[True]}
        handles = [Line2D([], [], color="0.6", label="Monte Carlo")]
        handles += [_key(label, "0.4", marker) for label, marker in kinds.items()]
        handles += [_key(name, colours[name], "s") for name in colours if colours[name] != "0.6"]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _point(axes: Axes, record: dict[str, Any], output: str, colour: str) -> None:
    axes.plot(
        record["cost"]["forward"]["time_ratio"],
        record[output]["rms_sd_error"],
        MARKERS[record["network"].startswith("trained")],
        color=colour,
        markersize=5,
        alpha=0.8,
        fillstyle="none" if record[output]["at_resolution"] else "full",
    )


def _key(label: str, colour: str, marker: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, linestyle="", markersize=5, label=label)
