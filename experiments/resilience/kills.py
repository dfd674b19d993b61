"""Runs of the experiment as a user starts them, and SIGKILL at random moments."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from experiments.command_line import PREEMPTED, PartError
from experiments.loop.records import METRICS, read_events, read_lines
from experiments.loop.store import saving_now, steps_on_disk

POLL = 0.005
TIMEOUT = 600.0  # seconds for anything that is waited for
ROOT = Path(__file__).parents[2]
VICTIMS = ("worker", "coordinator", "workers", "supervisor", "everything")
MOMENTS = ("train", "save", "train", "save", "start")
MOST_SAVE_SECONDS = 0.15  # a kill within a save comes up to so long after its beginning
LEAVE_FOR_LAST = 0.85  # no kill is planned beyond this share of the updates


class Run:
    """`python -m experiments resilience` in its own process group: begins and ends with the block."""

    process: subprocess.Popen[bytes]

    def __init__(self, options: Sequence[str], folder: Path) -> None:
        self.options = [*options, "--out", str(folder)]
        self.folder, self.log = folder, folder.with_suffix(".log")

    def start(self) -> None:
        """Start the command, or start it again. All runs share compiled programs."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        own = {"JAX_COMPILATION_CACHE_DIR": str(self.folder.parent.absolute() / "compiled")}
        own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2", "PYTHONPATH": path}
        command = [sys.executable, "-m", "experiments", "resilience", *self.options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def expect(self, status: int) -> None:
        """Wait for its end with this status."""
        if self.process.wait(TIMEOUT) != status:
            raise self._ended()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if self.process.poll() is not None and not condition():
                raise self._ended()
            if time.monotonic() > deadline:
                raise PartError(f"the run in {self.folder} did not go on for {TIMEOUT:.0f} s")
            time.sleep(POLL)

    def wait_for_more(self, event: str, before: int) -> None:
        """Wait until there are more than `before` events of this name."""
        self.wait_for(lambda: len(self.events(event)) > before)

    def _ended(self) -> PartError:
        said = self.log.read_text(errors="replace")[-300:]
        return PartError(f"the run in {self.folder} ended with {self.process.returncode}: {said}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its events of this name."""
        return read_events(self.folder, name)

    def metrics(self) -> list[dict[str, Any]]:
        """A line for each update."""
        return read_lines(self.folder / METRICS)

    def last_step(self) -> int:
        """The last update of which there are metrics."""
        rows = self.metrics()
        return int(rows[-1]["step"]) if rows else 0


@dataclasses.dataclass
class Kill:
    """One kill: its victim, its phase, and its consequences."""

    victim: str  # one of `VICTIMS`
    moment: str  # the phase that was aimed at, one of `MOMENTS`
    step: int = 0  # the last update with metrics at the kill
    checkpoint: int = 0  # the latest whole checkpoint at the kill
    mid_save: bool = False  # whether a checkpoint lay half written after it
    starts: int = 0  # how often the training had started before it
    resumed: int = 0  # the update that the next life went on from
    lost: int = 0  # updates lost although a complete checkpoint had them; must be 0


def disturb(run: Run, count: int, num_steps: int, rng: np.random.Generator) -> list[Kill]:
    """Carry out kills of a run, and start the command again where its supervisor was killed.

    Victims and moments occur equally often, in random order.
    """
    victims = rng.permutation([VICTIMS[i % len(VICTIMS)] for i in range(count)])
    moments = rng.permutation([MOMENTS[i % len(MOMENTS)] for i in range(count)])
    kills, lives = [], 0
    for index, (victim, moment) in enumerate(zip(victims, moments, strict=True)):
        run.wait_for_more("launch", lives)
        _await_moment(run, str(moment), count - index, num_steps, rng)
        lives, checkpoint = len(run.events("launch")), max(steps_on_disk(run.folder), default=0)
        kill = Kill(str(victim), str(moment), run.last_step(), checkpoint)
        kill.starts = len(run.events("start"))
        _strike(run, kill.victim)
        kill.mid_save = saving_now(run.folder)
        kills.append(kill)
        if victim in ("supervisor", "everything"):
            run.process.wait(TIMEOUT)
            run.start()
    return kills


def _await_moment(
    run: Run, moment: str, left: int, num_steps: int, rng: np.random.Generator
) -> None:
    launches, starts = run.events("launch"), run.events("start")
    if moment == "start":  # which takes as long as the first one did
        took = starts[0]["time"] - launches[0]["time"] if starts else 5.0
        time.sleep(rng.uniform(0, took))
        return
    run.wait_for(lambda: any(s["time"] > launches[-1]["time"] for s in run.events("start")))
    first = int(run.events("start")[-1]["step"])
    room = max(1, int(LEAVE_FOR_LAST * num_steps) - first)
    target = first + int(rng.integers(1, max(2, 2 * room // (left + 1)) + 1))
    if moment == "save":
        run.wait_for(lambda: saving_now(run.folder))
        time.sleep(rng.uniform(0, MOST_SAVE_SECONDS))
    else:
        run.wait_for(lambda: run.last_step() >= target)
        time.sleep(rng.uniform(0, run.metrics()[-1]["seconds"]))


def _strike(run: Run, victim: str) -> None:
    """SIGKILL."""
    pids: list[int] = run.events("launch")[-1]["pids"]
    if victim == "everything":
        os.killpg(run.process.pid, signal.SIGKILL)
        return
    supervisor = [run.process.pid]
    targets = {"worker": pids[-1:], "coordinator": pids[:1], "workers": pids}
    for pid in targets.get(victim, supervisor):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def preempt(run: Run, starts: int) -> dict[str, Any]:
    """Send SIGTERM to the supervisor during training, and measure the time to save and leave.

    There were `starts` before the last kill: the next one is waited for.
    """
    run.wait_for_more("start", starts)
    begun = int(run.events("start")[-1]["step"])
    run.wait_for(lambda: run.last_step() > begun)
    moment = time.time()
    run.process.terminate()
    run.expect(PREEMPTED)
    left, saved, made = time.time(), run.events("saved")[-1], run.last_step()
    if made != saved["step"] or saved["step"] not in steps_on_disk(run.folder):
        raise PartError(f"SIGTERM: updates up to {made} were made, and {saved['step']} saved")
    times = {"seconds_to_saved": saved["time"] - moment, "seconds_to_exit": left - moment}
    return {"step": saved["step"], **times}
