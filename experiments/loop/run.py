"""The training loop of one process, and its preemption by SIGTERM."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from experiments.command_line import PreemptedError
from experiments.loop.job import Job, Reader
from experiments.loop.records import Metrics, add_event
from experiments.loop.state import Blueprint
from experiments.loop.store import Store, is_main_process
from experiments.loop.update import Guard, compiled_update
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


@dataclasses.dataclass(frozen=True)
class Saving:
    """Where and when a run saves."""

    folder: Path  # of the run; it exists
    every: int = 100  # updates between checkpoints; the last update is saved too
    stop_at: int | None = None  # leave after this update, as if asked to; None to stay to the end
    any_version: bool = False  # see `Store`


def fit(job: Job, mesh: Mesh, saving: Saving, *, fsdp: bool = True) -> TrainState:
    """Train to the end, from the latest checkpoint if there is one. Call in every process.

    Raises:
      InputError: if the batch does not divide, or the folder holds something else.
      PartError: if something is not finite. The latest checkpoint is of before.
      PreemptedError: if asked to leave. All that was done is on disk.
    """
    reader = Reader(job, mesh)
    blueprint = Blueprint.of(job, mesh, fsdp=fsdp)
    with (
        Preemption() as preemption,
        Store(saving.folder, job, blueprint, any_version=saving.any_version) as store,
    ):
        restored = store.restore()
        if restored is None:
            state = blueprint.start(job)
        else:
            state, reader.position = restored.state, restored.position
        first = int(state.step)
        with _Log(job, saving.folder, first, Guard(state.params)) as log:
            if is_main_process():
                found = None if restored is None else restored.digest
                add_event(saving.folder, "start", step=first, digest=found)
            update = compiled_update(job, blueprint)
            for step in range(first + 1, job.num_steps + 1):
                state, outcome = update(state, reader.next())
                log.add(step, outcome)
                last = step == job.num_steps
                leave = preemption.reached(step) or step == saving.stop_at
                if last or leave or step % saving.every == 0:
                    log.flush()  # raises before saving if this update is not finite
                    bits = store.save(step, state, reader.position)
                    if is_main_process():
                        add_event(saving.folder, "save", step=step, digest=bits)
                if (last or leave) and is_main_process():
                    store.wait()
                    add_event(saving.folder, "saved", step=step, digest=bits)
                if leave and not last:
                    store.wait()
                    raise PreemptedError(
                        f"asked to leave after update {step} of {job.num_steps}, which is saved in "
                        f"{saving.folder}; the same command goes on from there"
                    )
            store.wait()
    return state


class _Log:
    """Progress and metrics; reads each update's figures when the next is under way already."""

    def __init__(self, job: Job, folder: Path, first: int, guard: Guard) -> None:
        self.guard = guard
        self.pending: tuple[int, Any] | None = None
        self.since = time.perf_counter()
        self.metrics = Metrics(folder, first) if is_main_process() else None
        self.progress = Progress(
            job.name, job.num_steps, initial=first, hidden=not is_main_process()
        )

    def add(self, step: int, outcome: Any) -> None:
        """Take an update's outcome, and process that of the update before."""
        self._finish()
        self.pending = (step, outcome)

    def flush(self) -> None:
        """Check all outcomes, and sync them to disk."""
        self._finish()
        if self.metrics is not None:
            self.metrics.sync()

    def _finish(self) -> None:
        if self.pending is None:
            return
        step, (report, flags) = self.pending
        self.pending = None
        self.guard.check(step, flags)
        values = {name: float(value) for name, value in report.items()}
        now = time.perf_counter()
        if self.metrics is not None:
            self.metrics.write(step, {**values, "seconds": round(now - self.since, 4)})
        self.since = now
        self.progress.update(1, values)

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.__exit__()
        if self.metrics is not None:
            self.metrics.close()
