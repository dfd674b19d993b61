"""The state of a run: created sharded, with a name for each leaf and a digest of all."""

from __future__ import annotations

import dataclasses
import hashlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import moment_jax as mj
from experiments.loop.job import Job
from experiments.training import TrainState

KeyPath = tuple[Any, ...]


def leaf_name(path: KeyPath) -> str:
    """The path of a leaf, as text, without the variable's own `value`."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """The structure of a job's state, and its sharding on a mesh."""

    graph: Any  # of the module, to be merged with parameters
    abstract: TrainState  # the state's shapes and dtypes with their shardings

    @classmethod
    def of(cls, job: Job, mesh: Mesh, *, fsdp: bool = True) -> Blueprint:
        """Trace the job's start; nothing is computed."""
        graph = nnx.graphdef(nnx.eval_shape(lambda: job.create(job.seed)))
        sizes = dict(mesh.shape)

        def place(path: KeyPath, leaf: Any) -> jax.ShapeDtypeStruct:
            # Counters and keys are replicated.
            spec = PartitionSpec()
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                names = [name for name in leaf_name(path).split(".") if not name.isdigit()]
                spec = mj.parallel.partition_spec(tuple(names), leaf.shape, sizes, fsdp=fsdp)
            sharding = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        shapes = jax.eval_shape(partial(_initial, job))
        return cls(graph, jax.tree_util.tree_map_with_path(place, shapes))

    @property
    def shardings(self) -> TrainState:
        """Where each leaf lies."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    @property
    def leaves(self) -> dict[str, str]:
        """Name of each leaf -> its dtype and shape, as text."""
        found = jax.tree_util.tree_leaves_with_path(self.abstract)
        return {leaf_name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in found}

    def start(self, job: Job) -> TrainState:
        """The state before the first update, made on the devices where it is to lie."""
        return jax.jit(partial(_initial, job), out_shardings=self.shardings)()


def _initial(job: Job) -> TrainState:
    params = nnx.state(job.create(job.seed))
    return TrainState(
        params, job.optimizer.init(params), jnp.int32(0), jax.random.key(job.seed + 1)
    )


def digest(state: TrainState) -> str:
    """A checksum of the bits of all leaves, the same on every mesh. Call in every process.

    It notices damage; it does not resist an attacker.
    """
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        found.update(bits(leaf))
    return found.hexdigest()[:16]


def bits(leaf: Array) -> bytes:
    """The bytes of a whole leaf, also of random keys. Call in every process."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    array = jax.random.key_data(leaf) if is_key else leaf
    if not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array).tobytes()
