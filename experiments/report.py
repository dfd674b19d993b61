"""Write one Markdown page of all metrics.json below a folder, with their figures.

The module also has the tables that the experiments print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from types import MappingProxyType

from experiments.report_page import add_arguments, run

__all__ = ["add_arguments", "aligned", "duration", "run", "scores_table", "with_error"]

COLUMNS = (("accuracy", ".3f"), ("nll", ".3f"), ("brier", ".3f"), ("ece", ".3f"))


def duration(seconds: float) -> str:
    """A time in a unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a table: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def with_error(figure: dict[str, float], form: str) -> str:
    """Mean and standard error over seeds; of one seed there is none."""
    error = "" if isnan(figure["error"]) else f" ± {figure['error']:{form}}"
    return f"{figure['mean']:{form}}{error}"


def scores_table(
    networks: dict[str, dict[str, dict[str, float]]],
    heads: Sequence[str] = (),
    others: Mapping[str, Sequence[dict[str, float]]] = MappingProxyType({}),
) -> str:
    """One row for each network: its scores on the test set over seeds, others, its time for an image."""
    rows = [["", "accuracy", "NLL", "Brier", "ECE", *heads, "time per image"]]
    for name, scores in networks.items():
        cells = [with_error(scores[key], form) for key, form in COLUMNS]
        more = [with_error(figure, ".2f") for figure in others.get(name, ())] or [""] * len(heads)
        rows.append([name, *cells, *more, duration(scores["seconds_per_image"]["mean"])])
    return aligned(rows)
