"""The training loop of one process, and its preemption by SIGTERM."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Self

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from experiments.command_line import PreemptedError
from experiments.loop.job import Job, batches
from experiments.loop.records import add_event, open_metrics
from experiments.loop.state import Blueprint
from experiments.loop.store import Store
from experiments.loop.update import check_finite, compiled_update
from experiments.progress import Progress
from experiments.stopping import StopRequest
from experiments.training import TrainState


class Preemption(StopRequest):
    """Notices SIGTERM within the block.

    With many processes JAX's own service has the signal, and agrees on an update that none has begun, so
    that all leave at the same one. With one process there is no such service.
    """

    def __init__(self) -> None:
        super().__init__(*([signal.SIGTERM] if jax.process_count() == 1 else []))

    def reached(self, step: int) -> bool:
        """Whether to save and leave after this update. Call after every update, in all processes."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self.received is not None


def fit(
    job: Job, mesh: Mesh, folder: Path, *, every: int = 100, stop_at: int | None = None,
    fsdp: bool = True,
) -> TrainState:  # fmt: skip
    """Train to the end, from the latest checkpoint if there is one. Call in every process.

    Args:
      job: what to train.
      mesh: of the devices of all processes.
      folder: of the run; it exists.
      every: updates between checkpoints; the last update is saved too.
      stop_at: leave after this update, as if asked to; None to stay to the end.
      fsdp: split parameters and optimiser over `data` too.

    Raises:
      InputError: if the batch does not divide, or the folder holds something else.
      PartError: if something is not finite. The latest checkpoint is of before.
      PreemptedError: if asked to leave. All that was done is on disk.
    """
    blueprint = Blueprint.of(job, mesh, fsdp=fsdp)
    with Preemption() as preemption, Store(folder, job, blueprint) as store:
        state, found = store.last() or (blueprint.start(job), None)
        first = int(state.step)
        given = batches(job, mesh, first)
        with _Log(job, folder, first, blueprint) as log:
            log.event("start", step=first, digest=found)
            update = compiled_update(job, blueprint)
            for step in range(first + 1, job.num_steps + 1):
                state, outcome = update(state, next(given))
                log.add(step, outcome)
                last = step == job.num_steps
                leave = preemption.reached(step) or step == stop_at
                if last or leave or step % every == 0:
                    log.flush()  # raises before saving if this update is not finite
                    bits = store.begin(step, state)
                    log.event("save", step=step, digest=bits)
                if last or leave:
                    store.wait()
                    log.event("saved", step=step, digest=bits)
                if leave and not last:
                    raise PreemptedError(
                        f"asked to leave after update {step} of {job.num_steps}, which is saved in "
                        f"{folder}; the same command goes on from there"
                    )
    return state


class _Log:
    """Progress, metrics and events; reads an update's figures when the next is under way already.

    The main process writes them; all check that they are finite.
    """

    def __init__(self, job: Job, folder: Path, first: int, blueprint: Blueprint) -> None:
        self.folder, self.params = folder, blueprint.abstract.params
        self.pending: tuple[int, Any] | None = None
        self.since = time.perf_counter()
        self.writes = jax.process_index() == 0
        self.metrics = open_metrics(folder, first) if self.writes else None
        self.progress = Progress(job.name, job.num_steps, initial=first, hidden=not self.writes)

    def event(self, name: str, **facts: Any) -> None:
        if self.writes:
            add_event(self.folder, name, **facts)

    def add(self, step: int, outcome: Any) -> None:
        """Take an update's outcome, and process that of the update before."""
        self._finish()
        self.pending = (step, outcome)

    def flush(self) -> None:
        """Check all outcomes, and sync them to disk."""
        self._finish()
        if self.metrics is not None:
            os.fsync(self.metrics.fileno())

    def _finish(self) -> None:
        if self.pending is None:
            return
        step, (report, flags) = self.pending
        self.pending = None
        check_finite(step, flags, self.params)
        values = {name: float(value) for name, value in report.items()}
        now = time.perf_counter()
        if self.metrics is not None:
            row = {"step": step, **values, "seconds": round(now - self.since, 4)}
            self.metrics.write(json.dumps(row) + "\n")
            self.metrics.flush()
        self.since = now
        self.progress.update(1, values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.__exit__()
        if self.metrics is not None:
            self.metrics.close()
