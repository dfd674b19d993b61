"""JSON lines: the metrics of every update and the events of a run."""

import itertools
import json
import time
from pathlib import Path
from typing import Any, TextIO

from experiments.outputs import whole_file

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"


def open_metrics(folder: Path, after: int) -> TextIO:
    """The file of metrics, to append to; lines after update `after` are made again, so they are cut."""
    path = folder / METRICS
    kept = itertools.takewhile(lambda row: row.get("step", after + 1) <= after, read_lines(path))
    with whole_file(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return path.open("a", encoding="utf-8")


def add_event(folder: Path, event: str, **facts: Any) -> None:
    """Append one event in a single write, so that lines of processes do not mix."""
    line = json.dumps({"event": event, "time": round(time.time(), 3), **facts}) + "\n"
    with (folder / EVENTS).open("ab", buffering=0) as file:
        file.write(line.encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file, which may be written to meanwhile; none if there is no file."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:  # truncated
            continue
    return [row for row in rows if isinstance(row, dict)]


def read_events(folder: Path, name: str) -> list[dict[str, Any]]:
    """The events of this name."""
    return [row for row in read_lines(folder / EVENTS) if row["event"] == name]
