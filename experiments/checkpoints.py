"""Checkpoints of a training run, in Orbax."""

import argparse
import shutil
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from experiments.command_line import InputError, writable_folder
from experiments.stopping import WRITING

T = TypeVar("T")

SPARE = 2**20  # bytes of a disk that are left free


def run_folder(args: argparse.Namespace) -> Path:
    """Create the run's --out folder if needed and return it."""
    folder = args.out / "checkpoints"  # of one training, or of several in subfolders
    if args.resume and not any(path.name.isdigit() for path in folder.glob("**/*")):
        raise InputError(
            f"--resume: {args.out} holds no checkpoint to go on from; give the --out of the run, or "
            "leave out --resume to start one"
        )
    return writable_folder(args.out, "--out")


class Checkpoints(ocp.CheckpointManager):
    """The checkpoints of one training run in one folder, the two latest of them.

    Each is a pytree of arrays, with a few settings. It is saved under a temporary name and renamed, so a
    run that dies leaves the last one usable.

    Args:
      folder: where they are; made if need be.
      settings: what the run was started with; a checkpoint of other settings is not restored.
      resume: go on from the latest checkpoint; otherwise those of an earlier run are removed.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.settings = settings
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        handler = ocp.StandardCheckpointHandler()  # named, or reading the settings alone warns
        with WRITING:
            if not resume:
                shutil.rmtree(folder, ignore_errors=True)
            super().__init__(folder.absolute(), options=options, item_handlers=handler)

    def keep(self, step: int, state: Any) -> None:
        """Save the state after `step` updates, and the settings."""
        needed = sum(x.nbytes for x in jax.tree.leaves(state))
        try:
            if shutil.disk_usage(self.directory).free < 2 * needed + SPARE:
                # Orbax's own threads would print a page.
                raise OSError(f"{needed / 1e6:.2g} MB do not fit")
            with WRITING:
                args = ocp.args.StandardSave(state)
                self.save(step, args=args, custom_metadata=self.settings, force=True)
        except (OSError, ValueError) as error:  # TensorStore's are of both kinds
            raise InputError(
                f"cannot save update {step} in {self.directory} ({str(error)[:200]}); name an --out "
                "with room that you may write to"
            ) from error

    def latest(self, like: T) -> T:
        """The latest checkpoint in the form of `like`, or `like` itself if there is none."""
        step = self.latest_step()
        if step is None:
            return like
        stored = self.metadata(step).custom_metadata
        for name, value in self.settings.items():
            if stored.get(name) != value:
                raise InputError(
                    f"--resume: {self.directory} was made with {name} {stored.get(name)}, not {value}; "
                    "give what it was made with, or leave out --resume to start again"
                )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored: T = self.restore(step, args=ocp.args.StandardRestore(abstract))
        return restored
