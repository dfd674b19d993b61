"""Compile the kernels of attention for a TPU, without having one, in a separate process.

`python -m tests.laws.kernel_for_tpu STRUCTURE T BATCH` compiles attention and its gradient, with heads
as wide as ViT-B's.
"""

from __future__ import annotations

import os
import sys

# Settings that libtpu needs on a machine without a TPU, read when it is loaded.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_LOG_DIR="disabled",
)

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import moment_jax as mj
from moment_jax.xla import kernels
from tests.builders import random_block

FEATURES, HEADS = 128, 2


def main(structure: type[mj.Covariance], tokens: int, batch: int) -> None:
    """Compile, and print the number of kernel calls."""
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    place = jax.sharding.SingleDeviceSharding(device)

    def arguments():
        params = random_block(jax.random.key(0), FEATURES, FEATURES).attention
        mean = jnp.ones((batch, tokens, FEATURES))
        cov = jax.vmap(structure.independent)(mean)
        return (params, mean, cov), jnp.ones((tokens, tokens), bool)

    def total(numbers, mask):
        params, mean, cov = numbers

        def of_one(mean, cov):
            mean, cov = mj.attention(mean, cov, params, num_heads=HEADS, mask=mask)
            return mean, cov.variance()

        return sum(jnp.sum(x**2) for x in jax.vmap(of_one)(mean, cov))

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(arguments)
    )
    with kernels("tpu"):
        lowered = jax.jit(jax.value_and_grad(total)).lower(*shapes)
    print("kernels", lowered.compile().as_text().count('custom_call_target="tpu_custom_call"'))


if __name__ == "__main__":
    main(getattr(mj, sys.argv[1]), *map(int, sys.argv[2:]))
