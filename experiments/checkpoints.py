"""Checkpoints of a training run: a thin wrapper, so that only this file knows the storage library."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from experiments.command_line import InputError

KEPT = 2
"""How many of the latest checkpoints are kept."""


class Checkpoints:
    """The checkpoints of one training run in one folder.

    A checkpoint is a pytree of arrays (typed random keys among them) with a few settings in JSON. It
    is saved under a temporary name and renamed, so a run that dies leaves the last one usable.

    Args:
      folder: where they are; made if need be.
      settings: what the run was started with; a checkpoint of other settings is not restored.
      resume: go on from the latest checkpoint; otherwise those of an earlier run are removed.

    Raises:
      InputError: if the folder holds a checkpoint of other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        self.settings = settings
        self.folder = folder.absolute()
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEPT,
                cleanup_tmp_directories=True,
                # A step's buffers are donated to the next, so they must be on disk before it starts.
                enable_async_checkpointing=False,
            ),
        )

    @property
    def latest(self) -> int | None:
        """The step of the latest checkpoint, or None."""
        return self.manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Save the state after `step` updates; returns when it is on disk."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(self.settings)
        )
        self.manager.save(step, args=items, force=True)

    def restore(self, like: Any) -> Any | None:
        """The latest checkpoint in the form of `like`, or None if there is none."""
        step = self.latest
        if step is None:
            return None
        stored = self.manager.restore(
            step, args=ocp.args.Composite(settings=ocp.args.JsonRestore())
        )
        for name, value in self.settings.items():
            before = stored.settings.get(name)
            if before != value:
                raise InputError(
                    f"--resume: {self.folder} was made with {name} {before}, not {value}; give what "
                    "it was made with, or leave out --resume to start anew"
                )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self.manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        ).state

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.manager.close()
