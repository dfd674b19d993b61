"""Progress of a loop: a bar on a terminal, else a line every few seconds."""

import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from tqdm import tqdm

SECONDS = 10.0  # between two lines


class Progress:
    """Progress of one loop, on standard error."""

    def __init__(
        self, name: str, total: int, *, initial: int = 0, unit: str = "step", hidden: bool = False
    ) -> None:
        self.name, self.total, self.done, self.unit = name, total, initial, unit
        self.figures = ""
        self.since = time.monotonic()
        shown = not hidden and sys.stderr.isatty()
        options: dict[str, Any] = {"total": total, "initial": initial, "unit": unit}
        self.bar = tqdm(desc=name, disable=not shown, **options)
        self.lines = not hidden and not shown
        self._write()

    def update(self, count: int = 1, figures: Mapping[str, float] | None = None) -> None:
        """Count `count` more steps; show these figures from now on."""
        self.done += count
        if figures is not None:
            self.figures = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            self.bar.set_postfix_str(self.figures, refresh=False)
        self.bar.update(count)
        if self.done >= self.total or time.monotonic() - self.since >= SECONDS:
            self._write()

    def _write(self) -> None:
        if self.lines:
            self.since = time.monotonic()
            words = [f"{self.name}: {self.done} of {self.total} {self.unit}s", self.figures]
            # In one piece, for several loops may write at the same time.
            sys.stderr.write("; ".join(filter(None, words)) + "\n")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
