"""Checkpoints of a training run, in Orbax."""

import argparse
import shutil
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from experiments.command_line import InputError, writable_folder

KEPT = 2
"""How many of the latest checkpoints are kept."""


def run_folder(args: argparse.Namespace) -> Path:
    """Create the run's --out folder if needed and return it."""
    folder = args.out / "checkpoints"  # of one training, or of several in subfolders
    if args.resume and not any(path.name.isdigit() for path in folder.glob("**/*")):
        raise InputError(
            f"--resume: {args.out} holds no checkpoint to go on from; give the --out of the run, or "
            "leave out --resume to start one"
        )
    return writable_folder(args.out, "--out")


class Checkpoints:
    """The checkpoints of one training run in one folder.

    A checkpoint is a pytree of arrays (typed random keys among them) with a few settings in JSON. It
    is saved under a temporary name and renamed, so a run that dies leaves the last one usable.

    Args:
      folder: where they are; made if need be.
      settings: what the run was started with; a checkpoint of other settings is not restored.
      resume: go on from the latest checkpoint; otherwise those of an earlier run are removed.
      background: write while the run goes on. What is saved must then not be donated to an update, so
        give a copy; otherwise `save` returns when all is on disk.
      option: beginning of the error about other settings, and fix: its advice.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        *,
        resume: bool,
        background: bool = False,
        option: str = "--resume",
        fix: str = "give what it was made with, or leave out --resume to start again",
    ) -> None:
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        self.settings = settings
        self.option, self.fix = option, fix
        self.folder = folder.absolute()
        # A step's buffers are donated to the next, so they must be on disk before it starts.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, cleanup_tmp_directories=True, enable_async_checkpointing=background
        )
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def save(self, step: int, state: Any, **facts: Any) -> None:
        """Save the state after `step` updates; settings and `facts` go into its JSON."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            settings=ocp.args.JsonSave({**self.settings, **facts}),
        )
        self.manager.save(step, args=items, force=True)

    def facts(self, step: int) -> dict[str, Any]:
        """The JSON of a checkpoint."""
        items = ocp.args.Composite(settings=ocp.args.JsonRestore())
        stored: dict[str, Any] = self.manager.restore(step, args=items).settings
        for name, value in self.settings.items():
            if stored.get(name) != value:
                raise InputError(
                    f"{self.option}: {self.folder} was made with {name} {stored.get(name)}, not "
                    f"{value}; {self.fix}"
                )
        return stored

    def restore(self, like: Any) -> Any | None:
        """The latest checkpoint in the form of `like`, or None if there is none."""
        step = self.manager.latest_step()
        if step is None:
            return None
        self.facts(step)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self.manager.restore(step, args=items).state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()
