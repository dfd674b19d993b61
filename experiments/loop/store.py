"""Checkpoints of a loop: written in the background, verified when restored, never code.

On disk are arrays (Orbax, OCDBT) and JSON; reading them executes nothing.
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax

from experiments.checkpoints import Checkpoints
from experiments.command_line import InputError
from experiments.loop.job import Job
from experiments.loop.state import Blueprint, copied, digest
from experiments.training import TrainState

CHECKPOINTS = "checkpoints"
LIBRARIES = ("moment_jax", "jax")
ANEW = "give what it was made with, or another --out"


class Restored(NamedTuple):
    """A checkpoint: the state, the position of the reader, and the digest that both times gave."""

    state: TrainState
    position: int
    digest: str


class Store:
    """The checkpoints of a run."""

    def __init__(self, folder: Path, job: Job, blueprint: Blueprint, *, any_version: bool) -> None:
        self.blueprint = blueprint
        self.any_version = any_version
        self.versions = {name: _version(name) for name in LIBRARIES}
        self.checkpoints = Checkpoints(
            folder / CHECKPOINTS,
            job.identity,
            resume=True,
            background=True,
            option="--out",
            fix=ANEW,
        )

    def save(self, step: int, state: TrainState, position: int) -> str:
        """Start saving and return the state's digest; the state may then be donated."""
        self.checkpoints.wait()  # one save at a time
        bits = digest(state)
        facts = {"versions": self.versions, "leaves": self.blueprint.leaves}
        self.checkpoints.save(step, copied(state), **facts, position=position, digest=bits)
        return bits

    def wait(self) -> None:
        """Return when all is on disk."""
        self.checkpoints.wait()

    def restore(self) -> Restored | None:
        """The latest checkpoint, on the mesh that there is now; None if there is none."""
        step = self.checkpoints.latest
        if step is None:
            return None
        facts = self._read(step, lambda: self.checkpoints.facts(step))
        self._check_versions(facts)
        self._check_leaves(facts)
        state = self._read(step, lambda: self.checkpoints.restore(self.blueprint.abstract))
        bits = digest(state)
        if bits != facts["digest"] or int(state.step) != step:
            raise self._damaged(step, "its content is not what was saved")
        return Restored(state, int(facts["position"]), bits)

    def _read(self, step: int, read: Any) -> Any:
        try:
            return read()
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(step, str(error).splitlines()[0][:200]) from error

    def _damaged(self, step: int, why: str) -> InputError:
        place = self.checkpoints.folder / str(step)
        return InputError(
            f"--out: the checkpoint {place} cannot be read, it is truncated or damaged ({why}); remove "
            "this folder to go on from the checkpoint before it"
        )

    def _check_versions(self, facts: dict[str, Any]) -> None:
        before = facts.get("versions", {})
        for name, now in self.versions.items():
            if before.get(name) != now and not self.any_version:
                raise InputError(
                    f"--out: {self.checkpoints.folder} was made with {name} {before.get(name)}, not "
                    f"{now}; install that version, or give --any-version to go on, not bit for bit"
                )

    def _check_leaves(self, facts: dict[str, Any]) -> None:
        before, now = facts.get("leaves", {}), self.blueprint.leaves
        for name in sorted(before.keys() | now.keys()):
            old, new = before.get(name, "nothing"), now.get(name, "nothing")
            if old != new:
                raise InputError(
                    f"--out: {self.checkpoints.folder} is of another model: {name} is {old} there, and "
                    f"{new} here; {ANEW}"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpoints.__exit__()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # imported from its source tree
        return "a source tree"


def steps_on_disk(folder: Path) -> list[int]:
    """The updates with complete checkpoints."""
    places = folder / CHECKPOINTS
    if not places.is_dir():
        return []
    return sorted(int(path.name) for path in places.iterdir() if path.name.isdigit())


def saving_now(folder: Path) -> bool:
    """Whether a checkpoint is being written, or was when its run was killed."""
    places = folder / CHECKPOINTS
    return places.is_dir() and any("tmp" in path.name for path in places.iterdir())


def is_main_process() -> bool:
    """The one process that writes what only one may write."""
    return jax.process_index() == 0
