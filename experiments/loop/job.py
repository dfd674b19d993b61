"""`Job`, the model, loss, data and settings of a run, and `Reader`, its batches.

Every process reads only its own rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.command_line import InputError
from experiments.loop.layout import check_batch

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


class Reader:
    """The batches of a job; each epoch has a new order, and an incomplete last batch is skipped.

    A batch of B examples comes as arrays (A, B / A, ...): A parts, to be gone through one after the
    other, each split over `data`. Which examples come next depends on the seed and the position alone,
    so a reader put back to a saved position goes on as if nothing had happened, on any mesh.
    """

    def __init__(self, job: Job, mesh: Mesh) -> None:
        check_batch(job.batch_size, job.accumulate, dict(mesh.shape))
        self.num_examples = len(job.arrays[0])
        if job.batch_size > self.num_examples:
            raise InputError(
                f"a batch of {job.batch_size} needs as many examples, and there are "
                f"{self.num_examples}; take a smaller --batch-size"
            )
        self.job = job
        self.position = 0
        self.parts = (job.accumulate, job.batch_size // job.accumulate)
        self.sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
        self.columns = _columns_here(self.sharding, self.parts)
        self._order: tuple[int, np.ndarray] | None = None

    def next(self) -> tuple[Array, ...]:
        """The next batch; advances the position."""
        size = self.job.batch_size
        epoch, within = divmod(self.position // size, self.num_examples // size)
        chosen = self._epoch(epoch)[within * size : (within + 1) * size].reshape(self.parts)
        local = chosen[:, self.columns]
        self.position += size
        return tuple(
            jax.make_array_from_process_local_data(
                self.sharding, array[local], (*self.parts, *array.shape[1:])
            )
            for array in self.job.arrays
        )

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng((self.job.seed, epoch)).permutation(self.num_examples)
            self._order = (epoch, order)
        return self._order[1]


def _columns_here(sharding: NamedSharding, parts: tuple[int, int]) -> np.ndarray:
    """Indices, in each part, of the examples for this process's devices."""
    every = np.arange(parts[1])
    places = sharding.addressable_devices_indices_map(parts).values()
    return np.unique(np.concatenate([every[place[1]] for place in places if place is not None]))
