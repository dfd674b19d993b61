"""Start the processes of a run, and restart all of them when one is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.command_line import PREEMPTED, InputError, PartError, PreemptedError
from experiments.loop.layout import HOST, Layout
from experiments.loop.records import add_event, read_events
from experiments.stopping import StopRequest

POLL = 0.02
GRACE = 30.0  # seconds from SIGTERM to SIGKILL, for writing a checkpoint
LOCK_TIMEOUT = 30.0  # seconds for the processes of a killed run to be gone
EXPECTED = (0, InputError.status, PartError.status, PREEMPTED)
LOCK, LOGS = ".lock", "logs"


@dataclasses.dataclass(frozen=True)
class Order:
    """A supervisor's order to its workers."""

    job: str  # "module:function", which makes a `Job` of the settings
    settings: dict[str, Any]  # in JSON's types
    layout: Layout
    folder: Path
    every: int = 100  # updates between checkpoints
    stop_at: int | None = None  # leave after this update
    restarts: int = 3  # how often the processes are started again before the run is given up

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Order:
        """The order that `to_json` gave."""
        content = json.loads(text)
        parts = {"layout": Layout(**content["layout"]), "folder": Path(content["folder"])}
        return cls(**{**content, **parts})


def supervise(order: Order) -> None:
    """Run to the end; restart all processes when one is lost.

    A process that dies takes the others with it, and all are started anew from the latest checkpoint.
    One folder has one run: a lock, which every process holds, keeps a second one out, also while
    processes of a killed supervisor are still on their way out.

    Raises:
      InputError: if a worker found its input bad, or another run is at work in the folder.
      PartError: if the run is not finite, or processes were lost more often than `restarts`.
      PreemptedError: after SIGTERM, or if the workers were asked to leave.
      KeyboardInterrupt: after Ctrl-C; what was done is saved.
    """
    folder = order.folder
    with _locked(folder) as lock, StopRequest(signal.SIGTERM, signal.SIGINT) as request:
        for attempt in range(order.restarts + 1):
            codes, lost = _attempt(order, attempt, lock, request)
            asked = request.received
            add_event(folder, "over", attempt=attempt, codes=codes, asked=asked and asked.name)
            if not any(codes):
                return
            for error in (InputError, PartError):
                if error.status in codes and not lost:
                    raise error(_message(folder, attempt))
            if asked == signal.SIGINT:
                raise KeyboardInterrupt(
                    f"stopped; the same command goes on from what is in {folder}"
                )
            if asked or PREEMPTED in codes:
                raise PreemptedError(_message(folder, attempt))
        said = [f"; {row['message']}" for row in read_events(folder, "error")[-1:]]
        raise PartError(
            f"a process was lost {order.restarts + 1} times (exit codes at last: {codes}"
            f"{''.join(said)}); see {folder / LOGS}; the same command goes on from the latest checkpoint"
        )


def _attempt(order: Order, attempt: int, lock: int, request: StopRequest) -> tuple[list[int], bool]:
    """Start all processes, wait for all, and return their exit codes, and whether one was lost.

    Where one was lost, an unreadable checkpoint may mean to another one no more than that: the
    communication of JAX raises the same errors as the reading of files.
    """
    folder = order.folder
    (folder / LOGS).mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    workers = [_start(order, rank, port, attempt, lock) for rank in range(order.layout.processes)]
    try:
        add_event(folder, "launch", attempt=attempt, pids=[worker.pid for worker in workers])
        _wait(workers, request)
        lost = any(worker.poll() not in (None, *EXPECTED) for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return [worker.returncode for worker in workers], lost


def _start(order: Order, rank: int, port: int, attempt: int, lock: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "experiments.loop.worker", str(rank), str(port), str(attempt)]
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    own = {"JAX_NUM_CPU_DEVICES": str(order.layout.devices), "PYTHONPATH": path}
    own["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
    with contextlib.ExitStack() as stack:
        log = None  # ours, for the progress bar
        if rank > 0 or not sys.stderr.isatty():
            file = order.folder / LOGS / f"worker-{rank}.log"
            log = stack.enter_context(file.open("ab"))
        return subprocess.Popen(
            [*command, order.to_json()],
            env=os.environ | own,
            stdin=subprocess.PIPE,  # closes when we end, which ends the worker
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(lock,),
        )


def _wait(workers: list[subprocess.Popen[bytes]], request: StopRequest) -> None:
    """Wait until all have ended, one is lost, or the grace period is over."""
    deadline = None
    while any(worker.poll() is None for worker in workers):
        codes = [worker.returncode for worker in workers if worker.returncode is not None]
        if any(code not in (0, PREEMPTED) for code in codes):
            return
        asked = request.received is not None
        if deadline is None and (asked or codes):
            deadline = time.monotonic() + GRACE
            for worker in workers:
                if asked and worker.poll() is None:
                    worker.terminate()
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(POLL)


def _message(folder: Path, attempt: int) -> str:
    """The first worker's final message."""
    said = read_events(folder, "ended")
    if said and said[-1].get("attempt") == attempt:
        return str(said[-1]["message"])
    return f"asked to leave; what was saved is in {folder}; the same command goes on from there"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Hold the lock of a folder; the system releases it with the last process that holds it."""
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"another run is at work in {folder}; wait for it, or name another --out"
                    ) from None
                time.sleep(POLL)
        yield lock
    finally:
        os.close(lock)
