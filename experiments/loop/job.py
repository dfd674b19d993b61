"""`Job`, the model, loss, data and settings of a run, and `batches`, what its updates take.

Every process reads only its own rows.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
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
        names = ("seed", "batch_size", "accumulate", "num_steps")
        return {"job": self.name, **{n: getattr(self, n) for n in names}, **self.settings}


def batches(job: Job, mesh: Mesh, first: int) -> Iterator[Batch]:
    """The batches of updates `first` + 1 and on; each epoch has a new order, and leaves out a remainder.

    A batch of B examples comes as arrays (A, B / A, ...): A parts, to be gone through one after the
    other, each split over `data`. Which examples come depends on the seed and the update alone, so a
    resumed run goes on as if nothing had happened, on any mesh.
    """
    check_batch(job.batch_size, job.accumulate, dict(mesh.shape))
    count, size = len(job.arrays[0]), job.batch_size
    if size > count:
        raise InputError(
            f"a batch of {size} needs as many examples, and there are {count}; take a smaller "
            "--batch-size"
        )
    parts = (job.accumulate, size // job.accumulate)
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
    places = sharding.addressable_devices_indices_map(parts).values()
    every = np.arange(parts[1])
    here = np.unique(np.concatenate([every[place[1]] for place in places if place is not None]))
    order = None
    for step in itertools.count(first):
        epoch, within = divmod(step, count // size)
        if order is None or within == 0:
            order = np.random.default_rng((job.seed, epoch)).permutation(count)
        local = order[within * size : (within + 1) * size].reshape(parts)[:, here]
        yield tuple(
            jax.make_array_from_process_local_data(
                sharding, array[local], (*parts, *array.shape[1:])
            )
            for array in job.arrays
        )
