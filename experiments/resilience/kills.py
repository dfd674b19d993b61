"""Runs of the experiment as a user starts them, and SIGKILL at random moments."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from experiments.command_line import PREEMPTED, PartError
from experiments.loop.records import EVENTS, METRICS, read_lines
from experiments.loop.store import saving_now, steps_on_disk

POLL = 0.005
TIMEOUT = 600.0  # seconds for anything that is waited for
ROOT = Path(__file__).parents[2]
VICTIMS = ("worker", "coordinator", "workers", "supervisor", "everything")
MOMENTS = ("train", "save", "train", "save", "start")
MOST_SAVE_SECONDS = 0.15  # a kill within a save comes up to so long after its beginning
LEAVE_FOR_LAST = 0.85  # no kill is planned beyond this share of the updates


class Run:
    """One `python -m experiments resilience` in its own process group, killed when the block ends."""

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
        """Wait for its end with this status."""
        if self.end() != status:
            raise self.ended(f"the run in {self.folder}")

    def ended(self, what: str) -> PartError:
        """The error that it has ended, with the end of what it printed."""
        assert self.process is not None
        assert self.process.stderr is not None
        said = self.process.stderr.read().decode(errors="replace")[-300:]
        return PartError(f"{what} ended with {self.status()}: {said}")

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
        """Wait until the condition holds; False if the command has ended without."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if self.status() is not None:
                return condition()
            if time.monotonic() > deadline:
                raise PartError(f"the run in {self.folder} did not go on for {TIMEOUT:.0f} s")
            time.sleep(POLL)
        return True


@dataclasses.dataclass
class Kill:
    """One kill: its victim, its phase, and its consequences."""

    victim: str  # one of `VICTIMS`
    moment: str  # the phase that was aimed at, one of `MOMENTS`
    step: int = 0  # the last update with metrics at the kill
    checkpoint: int = 0  # the latest whole checkpoint at the kill
    mid_save: bool = False  # whether a checkpoint lay half written after it
    resumed: int | None = None  # the update that the next life went on from
    digest: str | None = None  # of what it restored

    @property
    def lost(self) -> int:
        """Updates lost although a complete checkpoint had them; must be 0."""
        return max(0, self.checkpoint - (self.resumed or 0))


def plan(count: int, rng: np.random.Generator) -> list[Kill]:
    """Plan `count` kills; victims and moments occur equally often, in random order."""
    victims = rng.permutation([VICTIMS[i % len(VICTIMS)] for i in range(count)])
    moments = rng.permutation([MOMENTS[i % len(MOMENTS)] for i in range(count)])
    return [Kill(str(victim), str(moment)) for victim, moment in zip(victims, moments, strict=True)]


def disturb(run: Run, kills: list[Kill], num_steps: int, rng: np.random.Generator) -> None:
    """Carry out the kills, and restart the command where its supervisor was killed."""
    run.start()
    lives = 0
    for index, kill in enumerate(kills):
        if not run.wait_for(partial(_launched, run, lives)):
            raise run.ended(f"kill {index}: the run")
        _await_moment(run, kill, len(kills) - index, num_steps, rng)
        lives = len(run.events("launch"))
        kill.step = run.last_step()
        kill.checkpoint = max(steps_on_disk(run.folder), default=0)
        starts = len(run.events("start"))
        _strike(run, kill.victim)
        kill.mid_save = saving_now(run.folder)
        if kill.victim in ("supervisor", "everything"):
            run.end()
            run.start()
        kill.resumed = starts  # number of the next start; see `settle`


def _launched(run: Run, lives: int) -> bool:
    return len(run.events("launch")) > lives


def settle(run: Run, kills: list[Kill]) -> None:
    """Look up the update from which each next life continued, once the run is over."""
    starts = run.events("start")
    for kill in kills:
        assert kill.resumed is not None
        row: dict[str, Any] = starts[kill.resumed]
        kill.resumed, kill.digest = int(row["step"]), row["digest"]


def _await_moment(
    run: Run, kill: Kill, left: int, num_steps: int, rng: np.random.Generator
) -> None:
    launch = run.events("launch")[-1]
    if kill.moment == "start":
        time.sleep(rng.uniform(0, _start_seconds(run)))
        return
    if not run.wait_for(lambda: any(row["time"] > launch["time"] for row in run.events("start"))):
        raise run.ended(f"the run in {run.folder}")
    first = int(run.events("start")[-1]["step"])
    room = max(1, int(LEAVE_FOR_LAST * num_steps) - first)
    target = first + int(rng.integers(1, max(2, 2 * room // (left + 1)) + 1))
    if kill.moment == "save":
        reached = run.wait_for(lambda: saving_now(run.folder))
        pause = rng.uniform(0, MOST_SAVE_SECONDS)
    else:
        reached = run.wait_for(lambda: run.last_step() >= target)
        pause = rng.uniform(0, run.metrics()[-1]["seconds"])
    if not reached:
        raise run.ended(f"the run in {run.folder}")
    time.sleep(pause)


def _start_seconds(run: Run) -> float:
    """How long a start took so far, from the launch of the workers to the first update."""
    launches, starts = run.events("launch"), run.events("start")
    return float(starts[0]["time"] - launches[0]["time"]) if starts else 5.0


def _strike(run: Run, victim: str) -> None:
    """SIGKILL."""
    assert run.process is not None
    pids: list[int] = run.events("launch")[-1]["pids"]
    targets = {
        "worker": pids[-1:],
        "coordinator": pids[:1],
        "workers": pids,
        "supervisor": [run.process.pid],
        "everything": [],
    }[victim]
    if victim == "everything":
        os.killpg(run.process.pid, signal.SIGKILL)
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def preempt(run: Run, starts: int) -> dict[str, Any]:
    """Send SIGTERM to the supervisor during training, and measure the time to save and leave.

    There were `starts` before the last kill: the next one is waited for.
    """
    run.wait_for(lambda: len(run.events("start")) > starts)
    begun = int(run.events("start")[-1]["step"])
    run.wait_for(lambda: run.last_step() > begun)
    assert run.process is not None
    moment = time.time()
    run.process.terminate()
    run.expect(PREEMPTED)
    left = time.time()
    saved = run.events("saved")[-1]
    if run.last_step() != saved["step"] or saved["step"] not in steps_on_disk(run.folder):
        raise PartError(
            f"SIGTERM: updates up to {run.last_step()} were made, and {saved['step']} saved"
        )
    return {
        "step": saved["step"],
        "seconds_to_saved": saved["time"] - moment,
        "seconds_to_exit": left - moment,
    }
