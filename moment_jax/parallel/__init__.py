"""Meshes of devices, and the shardings of parameters and batches on them.

The transforms are compiled for the shardings of their inputs, and the compiler adds the communication
(GSPMD). The axis `data` splits batches and rows of parameters (FSDP), and `model` splits
heads, hidden features and vocabularies.
"""

from moment_jax.parallel.sharding import make_mesh, partition_spec, shard, shard_batch, shardings

__all__ = ["make_mesh", "partition_spec", "shard", "shard_batch", "shardings"]
