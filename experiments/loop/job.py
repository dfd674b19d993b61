"""`Job`: the model, loss, data and settings of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

Array = jax.Array
Batch = tuple[Array, ...]
Report = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train, the same in every process."""

    name: str  # shown with the progress
    create: Callable[[int], nnx.Module]  # seed -> the untrained module; called inside `jit`
    loss: Callable[[Any, Batch, Array, Array], tuple[Array, Report]]  # (module, batch, key, step)
    optimizer: optax.GradientTransformation
    arrays: tuple[np.ndarray, ...]  # training data; their leading axis counts the examples
    batch_size: int  # examples of an update, over all devices
    num_steps: int
    accumulate: int = 1  # parts of a batch, whose gradients are averaged
    seed: int = 0  # of weights, order of examples and noise
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What else a checkpoint has to agree with, in JSON's types."""

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that a run shares with the checkpoints it resumes from."""
        return {
            "job": self.name,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "num_steps": self.num_steps,
            **self.settings,
        }
