"""Checkpoints of a training run, in Orbax."""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

import moment_jax as mj
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


def structure_of(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a run in a structure that the library no longer has."""
    name = settings.get("structure")
    if name is not None and name not in mj.STRUCTURES:
        raise InputError(
            f"{folder} is of a run in {name}, a structure that moment_jax no longer has (it has "
            f"{', '.join(mj.STRUCTURES)}); train again, without --resume"
        )


class Checkpoints:
    """The checkpoints of one training run in one folder.

    A checkpoint is a pytree of arrays (typed random keys among them) with a few settings in JSON. It
    is saved under a temporary name and renamed, so a run that dies leaves the last one usable.

    Args:
      folder: where they are; made if need be.
      settings: what the run was started with; a checkpoint of other settings is not restored.
      resume: go on from the latest checkpoint; otherwise those of an earlier run are removed.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        self.settings = settings
        self.folder = folder.absolute()
        # A step's buffers are donated to the next, so they must be on disk before it starts.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def save(self, step: int, state: Any) -> None:
        """Save the state after `step` updates, and the settings in its JSON."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(self.settings)
        )
        self.manager.save(step, args=items, force=True)

    def restore(self, like: Any) -> Any | None:
        """The latest checkpoint in the form of `like`, or None if there is none."""
        step = self.manager.latest_step()
        if step is None:
            return None
        items = ocp.args.Composite(settings=ocp.args.JsonRestore())
        stored: dict[str, Any] = self.manager.restore(step, args=items).settings
        structure_of(self.folder, stored)
        for name, value in self.settings.items():
            if stored.get(name) != value:
                raise InputError(
                    f"--resume: {self.folder} was made with {name} {stored.get(name)}, not {value}; "
                    "give what it was made with, or leave out --resume to start again"
                )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self.manager.restore(step, args=items).state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()
