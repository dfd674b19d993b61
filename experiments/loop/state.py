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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import moment_jax as mj
from experiments.loop.job import Job
from experiments.training import TrainState

Array = jax.Array
KeyPath = tuple[Any, ...]


def names_of(path: KeyPath) -> tuple[Any, ...]:
    """Names and indices on the path to a leaf, without the variable's own `value`."""
    parts = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path]
    return tuple(parts[:-1] if parts and parts[-1] == "value" else parts)


def leaf_name(path: KeyPath) -> str:
    """The path of a leaf, as text."""
    return ".".join(str(part) for part in names_of(path))


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """The structure of a job's state, and its sharding on a mesh."""

    graph: Any  # of the module, to be merged with parameters
    abstract: TrainState  # the state's shapes and dtypes with their shardings
    mesh: Mesh  # where it lies

    @classmethod
    def of(cls, job: Job, mesh: Mesh, *, fsdp: bool = True) -> Blueprint:
        """Trace the job's start; nothing is computed."""
        graph = nnx.graphdef(nnx.eval_shape(lambda: job.create(job.seed)))
        sizes = dict(mesh.shape)

        def place(path: KeyPath, leaf: Any) -> jax.ShapeDtypeStruct:
            # Counters and keys are replicated.
            spec = PartitionSpec()
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                spec = mj.parallel.partition_spec(names_of(path), leaf.shape, sizes, fsdp=fsdp)
            sharding = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        shapes = jax.eval_shape(partial(_initial, job))
        return cls(graph, jax.tree_util.tree_map_with_path(place, shapes), mesh)

    @property
    def shardings(self) -> TrainState:
        """Where each leaf lies."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    def all_finite(self, loss: Array, grads: Any, params: Any) -> Array:
        """Inside `jit`: whether the loss, each gradient and each parameter is finite, as one vector."""
        specs = jax.tree.map(lambda place: place.spec, self.shardings.params)
        places = (PartitionSpec(), specs, specs)

        # By hand: the compiler would communicate once for each leaf.
        @partial(
            jax.shard_map,
            mesh=self.mesh,
            in_specs=places,
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        def finite(*parts: Any) -> Array:
            bad = [jnp.any(~jnp.isfinite(part)) for part in jax.tree.leaves(parts)]
            return jax.lax.psum(jnp.stack(bad).astype(jnp.int32), self.mesh.axis_names) == 0

        return finite(loss, grads, params)

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


@jax.jit
def copied(state: TrainState) -> TrainState:
    """A copy whose buffers no update donates while they are written."""
    return jax.tree.map(jnp.copy, state)


def digest(state: TrainState, mesh: Mesh) -> str:
    """A checksum of all leaves, independent of the mesh.

    For each leaf a sum of integers modulo 2^32, whose order does not matter, over mixed entries with odd
    weights, so that they cannot change places. It notices damage; it does not resist an attacker.
    """
    leaves = [_raw(leaf) for leaf in jax.tree.leaves(state)]
    sums = np.asarray(_digests(leaves, tuple(_spec(leaf) for leaf in leaves), mesh))
    return hashlib.sha256(sums.astype("<u4").tobytes()).hexdigest()[:16]


def _spec(leaf: Array) -> PartitionSpec:
    assert isinstance(leaf.sharding, NamedSharding)
    return leaf.sharding.spec


def _raw(leaf: Array) -> Array:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


@partial(jax.jit, static_argnums=(1, 2))
def _digests(leaves: list[Array], specs: tuple[PartitionSpec, ...], mesh: Mesh) -> Array:
    shapes = [leaf.shape for leaf in leaves]

    # By hand: the compiler would reduce once for each leaf.
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def summed(parts: list[Array]) -> Array:
        sums = [_digest(*given) for given in zip(parts, shapes, specs, strict=True)]
        # A leaf that an axis does not split is replicated along it; count one copy.
        owned = [_is_first(mesh, spec) for spec in specs]
        return jax.lax.psum(jnp.stack(sums) * jnp.stack(owned), mesh.axis_names)

    return summed(leaves)


def _is_first(mesh: Mesh, spec: PartitionSpec) -> Array:
    first = jnp.uint32(1)
    for axis in mesh.axis_names:
        index = jax.lax.axis_index(axis).astype(jnp.uint32)
        first = first * (jnp.uint32(1) if axis in spec else (index == 0).astype(jnp.uint32))
    return first


def _digest(part: Array, shape: tuple[int, ...], spec: PartitionSpec) -> Array:
    """The sum of a device's part of an array of this shape."""
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[part.dtype.itemsize]
    if part.dtype == bool:
        part = part.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(part, width)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        size = shape[axis] if axis < len(shape) else bits.shape[axis]
        split = spec[axis] if axis < len(spec) else None
        if split is not None:
            place = place + jax.lax.axis_index(split).astype(jnp.uint32) * jnp.uint32(
                bits.shape[axis]
            )
        index = index * jnp.uint32(size) + place
    mixed = bits.astype(jnp.uint32) ^ (index * jnp.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = mixed ^ (mixed >> 13)
    return jnp.sum(mixed * (2 * index + 1), dtype=jnp.uint32)
