"""Checkpoints of a loop: written in the background, verified when restored, never code.

On disk are arrays (Orbax, OCDBT) and JSON; reading them executes nothing.
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.checkpoints import Checkpoints
from experiments.command_line import InputError
from experiments.loop.job import Job
from experiments.loop.state import Blueprint, digest
from experiments.training import TrainState

CHECKPOINTS = "checkpoints"
ANEW = "give what it was made with, or another --out"


class Store(Checkpoints):
    """The checkpoints of a run."""

    def __init__(self, folder: Path, job: Job, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        settings = {**job.identity, **{name: _version(name) for name in ("moment_jax", "jax")}}
        more: dict[str, Any] = {"option": "--out", "fix": ANEW, "background": True}
        super().__init__(folder / CHECKPOINTS, settings, resume=True, **more)
        self.wait = self.manager.wait_until_finished

    def begin(self, step: int, state: TrainState) -> str:
        """Start saving and return the state's digest; the state may then be donated."""
        self.wait()  # one save at a time
        bits = digest(state)
        self.save(step, _copied(state), leaves=self.blueprint.leaves, digest=bits)
        return bits

    def last(self) -> tuple[TrainState, str] | None:
        """The latest state, on the mesh that there is now, and its digest, which was saved with it."""
        step = self.manager.latest_step()
        if step is None:
            return None
        try:
            facts = self.facts(step)
            self._check_leaves(facts)
            state: Any = self.restore(self.blueprint.abstract)
            bits = digest(state)
            if bits != facts["digest"] or int(state.step) != step:
                raise ValueError("its content is not what was saved")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"--out: the checkpoint {self.folder / str(step)} cannot be read, it is truncated or "
                f"damaged ({str(error).splitlines()[0][:200]}); remove this folder to go on from the "
                "checkpoint before it"
            ) from error
        return state, bits

    def _check_leaves(self, facts: dict[str, Any]) -> None:
        before, now = facts.get("leaves", {}), self.blueprint.leaves
        for name in sorted(before.keys() | now.keys()):
            old, new = before.get(name, "nothing"), now.get(name, "nothing")
            if old != new:
                raise InputError(
                    f"--out: {self.folder} is of another model: {name} is {old} there, and {new} here; "
                    f"{ANEW}"
                )


@jax.jit
def _copied(state: TrainState) -> TrainState:
    """A copy whose buffers no update donates while they are written."""
    return jax.tree.map(jnp.copy, state)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # imported from its source tree
        return "a source tree"


def steps_on_disk(folder: Path) -> list[int]:
    """The updates with complete checkpoints."""
    return sorted(
        int(path.name) for path in (folder / CHECKPOINTS).glob("*") if path.name.isdigit()
    )


def saving_now(folder: Path) -> bool:
    """Whether a checkpoint is being written, or was when its run was killed."""
    return any((folder / CHECKPOINTS).glob("*tmp*"))
