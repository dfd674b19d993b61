"""SIGKILL at random moments: victim, moment and cost of each."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from functools import partial
from typing import Any

import numpy as np

from experiments.command_line import PREEMPTED, PartError
from experiments.loop.store import saving_now, steps_on_disk
from experiments.resilience.runs import Run

VICTIMS = ("worker", "coordinator", "workers", "supervisor", "everything")
MOMENTS = ("train", "save", "train", "save", "start")
MOST_SAVE_SECONDS = 0.15  # a kill within a save comes up to so long after its beginning
LEAVE_FOR_LAST = 0.85  # no kill is planned beyond this share of the updates


@dataclasses.dataclass
class Kill:
    """One kill: its victim, its phase, and its consequences.

    Args:
      victim: one of `VICTIMS`.
      moment: the phase that was aimed at, one of `MOMENTS`.
      step: the last update with metrics at the kill.
      checkpoint: the latest whole checkpoint at the kill.
      mid_save: whether a checkpoint lay half written after it.
      resumed: the update that the next life went on from.
      digest: of what it restored.
    """

    victim: str
    moment: str
    step: int = 0
    checkpoint: int = 0
    mid_save: bool = False
    resumed: int | None = None
    digest: str | None = None

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
    """Carry out the kills, and restart the command where its supervisor was killed.

    Raises:
      PartError: if the run ends before, or otherwise than by our doing.
    """
    run.start()
    lives = 0
    for index, kill in enumerate(kills):
        if not run.wait_for(partial(_launched, run, lives)):
            raise PartError(f"kill {index}: the run ended with {run.status()}: {run.said()}")
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
        kill.resumed = starts  # until the next start is known, its number; see `settle`


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
        raise PartError(f"the run in {run.folder} ended with {run.status()}: {run.said()}")
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
        raise PartError(f"the run in {run.folder} ended with {run.status()}: {run.said()}")
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


def preempt(run: Run) -> dict[str, Any]:
    """Send SIGTERM to the supervisor during training, and measure the time to save and leave.

    Raises:
      PartError: if it does not end with the status of a preempted run, all its updates saved.
    """
    starts = len(run.events("start"))
    launches = len(run.events("launch"))
    if starts < launches:  # still on its way
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
