"""Progress of a loop: a line on standard error every few seconds."""

import sys
import time
from collections.abc import Mapping

SECONDS = 10.0  # between two lines


class Progress:
    """Progress of one loop of `total` updates."""

    def __init__(self, name: str, total: int, *, initial: int = 0) -> None:
        self.name, self.total, self.done, self.figures = name, total, initial, ""
        self._write()

    def update(self, count: int = 1, figures: Mapping[str, float] | None = None) -> None:
        """Count `count` more updates; show these figures from now on."""
        self.done += count
        if figures is not None:
            self.figures = "; " + ", ".join(f"{name} {v:.4g}" for name, v in figures.items())
        if self.done >= self.total or time.monotonic() - self.since >= SECONDS:
            self._write()

    def _write(self) -> None:
        self.since = time.monotonic()
        # In one piece, for several loops may write at the same time.
        sys.stderr.write(f"{self.name}: {self.done} of {self.total} steps{self.figures}\n")
        sys.stderr.flush()
