"""JSON lines: the metrics of every update and the events of a run."""

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"


class Metrics:
    """One line for each update; lines of updates after `after`, which are made again, are cut off."""

    def __init__(self, folder: Path, after: int) -> None:
        path = folder / METRICS
        if path.exists():
            with path.open("r+b") as file:
                file.truncate(_length_until(file, after))
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append and flush the line of an update."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Sync to disk; call before saving a checkpoint."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _length_until(file: Any, last: int) -> int:
    """Bytes of the whole lines of updates up to `last`."""
    length = 0
    for line in file:
        row = _parsed(line)
        if row is None or row.get("step", last + 1) > last:
            break
        length += len(line)
    return length


def _parsed(line: bytes | str) -> dict[str, Any] | None:
    """The object of a line; None for a truncated line."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def add_event(folder: Path, event: str, **facts: Any) -> None:
    """Append one event in a single write, so that lines of processes do not mix."""
    line = json.dumps({"event": event, "time": round(time.time(), 3), **facts}) + "\n"
    with (folder / EVENTS).open("ab", buffering=0) as file:
        file.write(line.encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file; none if there is no file."""
    if not path.exists():
        return []
    rows = (_parsed(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row is not None]
