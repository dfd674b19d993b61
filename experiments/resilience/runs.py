"""Runs of the resilience experiment as a user starts them, watched from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from experiments.command_line import PartError
from experiments.loop.records import EVENTS, METRICS, read_lines

POLL = 0.005
TIMEOUT = 600.0  # seconds for anything that is waited for
ROOT = Path(__file__).parents[2]


class Run:
    """One `python -m experiments resilience` in a process group of its own, dead when the block ends.

    Args:
      options: of the command line.
      folder: its --out.
    """

    def __init__(self, options: Sequence[str], folder: Path) -> None:
        self.options = [*options, "--out", str(folder)]
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command, or start it again."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "experiments", "resilience", *self.options],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def status(self) -> int | None:
        """Its exit status, or None while it runs."""
        return None if self.process is None else self.process.poll()

    def end(self) -> int:
        """Wait for its end, and return its exit status."""
        self.wait_for(lambda: self.status() is not None)
        assert self.process is not None
        return int(self.process.returncode)

    def expect(self, status: int) -> None:
        """Wait for its end.

        Raises:
          PartError: if it ends otherwise.
        """
        if self.end() != status:
            raise PartError(f"the run in {self.folder} ended with {self.status()}: {self.said()}")

    def said(self) -> str:
        """The end of its standard error, once it has ended."""
        if self.process is None or self.process.stderr is None:
            return ""
        return self.process.stderr.read().decode(errors="replace")[-300:]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its events of this name."""
        return [row for row in read_lines(self.folder / EVENTS) if row["event"] == name]

    def metrics(self) -> list[dict[str, Any]]:
        """A line for each update."""
        return read_lines(self.folder / METRICS)

    def last_step(self) -> int:
        """The last update of which there are metrics."""
        rows = self.metrics()
        return int(rows[-1]["step"]) if rows else 0

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds; False if the command has ended without.

        Raises:
          PartError: if it takes too long.
        """
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if self.status() is not None:
                return condition()
            if time.monotonic() > deadline:
                raise PartError(f"the run in {self.folder} did not go on for {TIMEOUT:.0f} s")
            time.sleep(POLL)
        return True
