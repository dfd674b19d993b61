"""Write one Markdown page of all metrics.json below a folder, with their figures.

The module also has the tables that the experiments print.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.report_page import add_arguments, run

__all__ = ["add_arguments", "aligned", "duration", "run", "scores_table"]

COLUMNS = (("accuracy", ".4f"), ("nll", ".4f"), ("brier", ".4f"), ("ece", ".4f"))


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


def scores_table(networks: dict[str, dict[str, float]]) -> str:
    """One row for each network: its scores on the test set and its time for one image."""
    rows = [["", "accuracy", "NLL", "Brier", "ECE", "time per image"]]
    for name, scores in networks.items():
        cells = [format(scores[key], form) for key, form in COLUMNS]
        rows.append([name, *cells, duration(scores["seconds_per_image"])])
    return aligned(rows)
