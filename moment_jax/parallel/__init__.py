"""Meshes of devices, and how parameters, batches and moments lie on them.

The transforms themselves know nothing of devices: they are compiled for the shardings of what comes in,
and the compiler adds the communication (GSPMD). Here is what to put in: batches and, if wished, rows of
parameters over the axis `data`, heads, hidden features and vocabularies over the axis `model`, and the
tokens of long sequences over the axis `sequence` (`by_sequence`).
"""

from moment_jax.parallel.mesh import make_mesh, shard_batch
from moment_jax.parallel.moments import constrain, moment_specs
from moment_jax.parallel.parameters import partition_spec, shard, shardings
from moment_jax.parallel.sequence import by_sequence, shard_sequences

__all__ = [
    "by_sequence",
    "constrain",
    "make_mesh",
    "moment_specs",
    "partition_spec",
    "shard",
    "shard_batch",
    "shard_sequences",
    "shardings",
]
