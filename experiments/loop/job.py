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
    """What to train, the same in every process.

    Args:
      name: shown with the progress.
      create: seed -> the untrained module; called inside `jit`
      loss: (module, batch, key, step) -> mean loss, report
      optimizer: an optax transformation.
      arrays: the training data; their leading axis counts the examples.
      batch_size: examples of an update, over all devices.
      num_steps: number of updates.
      accumulate: parts of a batch, whose gradients are averaged
      seed: of weights, order of examples and noise.
      settings: what else a checkpoint has to agree with, in JSON's types.
    """

    name: str
    create: Callable[[int], nnx.Module]
    loss: Callable[[Any, Batch, Array, Array], tuple[Array, Report]]
    optimizer: optax.GradientTransformation
    arrays: tuple[np.ndarray, ...]
    batch_size: int
    num_steps: int
    accumulate: int = 1
    seed: int = 0
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

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
