"""Compile the kernel of `Diagonal`'s attention for a TPU, without having one, in a separate process.

`python -m tests.laws.kernel_for_tpu T BATCH` compiles it and its gradient for heads of ViT-B.
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

from moment_jax.layers.attention.diagonal_heads import Heads
from moment_jax.layers.attention.diagonal_kernel import find_plan, mix_by_kernel
from moment_jax.layers.attention.diagonal_rows import Part, Shared
from moment_jax.xla import kernels

FEATURES, HEADS = 768, 12
WIDTH = FEATURES // HEADS


def main(tokens: int, batch: int) -> None:
    """Compile, and print the number of kernel calls."""
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]

    def array(*shape: int, dtype: type = jnp.float32) -> jax.ShapeDtypeStruct:
        place = jax.sharding.SingleDeviceSharding(device)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    part = Part(*(array(batch, HEADS, tokens, WIDTH) for _ in range(2)))
    shared = Shared(array(batch, 1, tokens), array(HEADS, WIDTH, WIDTH))
    numbers = Heads(part, part, part, shared, array(batch, HEADS, tokens, 1), None)
    axes = Heads(0, 0, 0, Shared(0, None), 0, None)

    def total(numbers: Heads, mask: jax.Array) -> jax.Array:
        def mix(heads: Heads):
            heads = heads._replace(mask=mask)
            plan = find_plan(heads, 2)
            assert plan is not None
            return mix_by_kernel(plan, heads)

        return sum(jnp.sum(x**2) for x in jax.vmap(mix, in_axes=(axes,))(numbers))

    mask = array(HEADS, tokens, tokens, dtype=jnp.bool_)
    with kernels("tpu"):
        lowered = jax.jit(jax.value_and_grad(total)).lower(numbers, mask)
    print("kernels", lowered.compile().as_text().count('custom_call_target="tpu_custom_call"'))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
