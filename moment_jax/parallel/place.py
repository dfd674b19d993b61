"""Batches on a mesh."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moment_jax.parallel.mesh import DATA

Array = jax.Array


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """The arrays of a batch, split by their leading axis over `data`.

    Args:
      batch: a pytree of arrays (B, ...).
      mesh: from `make_mesh`.

    Raises:
      ValueError: if the devices along `data` do not divide B.
    """
    count = mesh.shape[DATA]
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim == 0 or leaf.shape[0] % count:
            where = jax.tree_util.keystr(path) or "batch"
            raise ValueError(
                f"`shard_batch` needs a leading axis that the {count} devices along data divide. Got "
                f"{tuple(leaf.shape)} at {where}. Take batches of a multiple of {count}."
            )
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(DATA)))
