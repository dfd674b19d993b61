"""Progress of a loop: a line on standard error every few seconds."""

import sys
import time

SECONDS = 10.0  # between two lines


class Progress:
    """Progress of one loop of `total` updates."""

    def __init__(self, name: str, total: int, *, initial: int = 0) -> None:
        self.name, self.total = name, total
        self._write(initial, "")

    def update(self, done: int, loss: float) -> None:
        """So many updates are done."""
        if done >= self.total or time.monotonic() - self.since >= SECONDS:
            self._write(done, f"; loss {loss:.4g}")

    def _write(self, done: int, loss: str) -> None:
        self.since = time.monotonic()
        # In one piece, for several loops may write at the same time.
        sys.stderr.write(f"{self.name}: {done} of {self.total} steps{loss}\n")
        sys.stderr.flush()
