"""Meshes of devices, and the shardings of parameters, batches and moments on them.

The transforms are compiled for the shardings of their inputs, and the compiler adds the communication
(GSPMD). The axis `data` splits batches and rows of parameters (FSDP), and `model` splits
heads, hidden features and vocabularies.
"""

from moment_jax.parallel.sharding import (
    constrain,
    make_mesh,
    moment_specs,
    partition_spec,
    shard,
    shard_batch,
    shardings,
)

__all__ = [
    "constrain", "make_mesh", "moment_specs", "partition_spec", "shard", "shard_batch", "shardings",
]  # fmt: skip
