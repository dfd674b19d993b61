"""Write one Markdown page of all metrics.json below a folder, with their figures.

The module also has the tables that the experiments print.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiments.command_line import InputError, Parser, path
from experiments.outputs import whole_file

LONGEST = 12  # numbers of a list that are shown; those of every split or image stay in the file
COLUMNS = (("accuracy", ".3f"), ("nll", ".3f"), ("brier", ".3f"), ("ece", ".3f"))


def add_arguments(parser: Parser) -> None:
    """The options of the report."""
    parser.add_argument(
        "folder", type=path, metavar="DIR", help="folder with metrics.json files at any depth"
    )


def run(args: argparse.Namespace) -> None:
    """Read all files before anything is written."""
    found = {file: _read(file) for file in sorted(args.folder.glob("**/metrics.json"))}
    if not found:
        raise InputError(f"{args.folder} holds no metrics.json; name the folder of finished runs")
    page = args.folder / "report.md"
    lines = [f"# Runs in {args.folder.name}"]
    for file, metrics in found.items():
        lines += ["", f"## {file.parent.relative_to(args.folder).as_posix()}", ""]
        figures = sorted(file.parent.glob("[!.]*.png"))
        lines += [f"![{f.stem}]({f.relative_to(args.folder).as_posix()})" for f in figures]
        lines += _section(metrics, ())
    with whole_file(page) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(found)} runs in {page}")


def _read(file: Path) -> dict[str, Any]:
    try:
        metrics = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}); run its experiment again") from error
    if not isinstance(metrics, dict):
        raise InputError(f"{file} holds no object but {type(metrics).__name__}")
    return metrics


def _section(metrics: dict[str, Any], above: tuple[str, ...]) -> Iterator[str]:
    """Single values as a list, groups of alike groups as a table, and the rest as sections."""
    single = {key: _text(value) for key, value in metrics.items() if _text(value) is not None}
    for key, text in single.items():
        yield f"- {key}: {text}"
    for key, value in metrics.items():
        if key in single or not isinstance(value, dict):
            continue
        names = (*above, key)
        yield from ("", f"**{' / '.join(names)}**", "")
        rows = {name: row for name, row in value.items() if isinstance(row, dict)}
        if len(rows) == len(value) > 1 and all(map(_is_row, rows.values())):
            yield from _table(rows)
        else:
            yield from _section(value, names)


def _is_row(row: dict[str, Any]) -> bool:
    return _text(row) is None and any(_text(value) is not None for value in row.values())


def _table(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    columns = list(
        dict.fromkeys(k for row in rows.values() for k, v in row.items() if _text(v) is not None)
    )
    yield "| | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, row in rows.items():
        yield f"| {name} | " + " | ".join(_text(row.get(c, "")) or "" for c in columns) + " |"


def _text(value: Any) -> str | None:
    """A number, a word, a short list, or a mean with its standard error; else None."""
    if isinstance(value, dict):
        if value.keys() != {"mean", "error"}:
            return None
        error = f" ± {_text(value['error'])}" if value["error"] is not None else ""
        return f"{_text(value['mean'])}{error}"
    if isinstance(value, list):
        texts = [_text(one) for one in value]
        return ", ".join(t or "" for t in texts) if len(value) <= LONGEST and all(texts) else None
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return str(value)


def duration(seconds: float) -> str:
    """A time with its unit, as text."""
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
    error = "" if math.isnan(figure["error"]) else f" ± {figure['error']:{form}}"
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
