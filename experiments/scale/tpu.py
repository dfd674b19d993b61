"""Part `tpu`: a train step of ViT-B/16 in moments, compiled ahead of time for a pod of TPU v5e.

Patches of images, a pre-norm encoder, the mean over the tokens, a linear head; `Diagonal`, float32,
parameters and Adam's state split over all chips. The arrays of the blocks are stacked, and the pass
scans over them, so one block is compiled; it is recomputed in the backward pass.
"""

import argparse
import importlib.util
import json
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import moment_jax as mj
from experiments.command_line import PartError
from experiments.outputs import duration
from experiments.scale import fresh

WITHOUT_CHIPS = {  # what libtpu asks of a machine without a TPU
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
}  # fmt: skip
TOPOLOGY = "v5e:4x4"
COLUMNS = 2  # chips that share heads and hidden units
PER_ROW = 8  # examples of a batch for each row of chips (the axis `data`)
MEMORY = 16 * 2**30  # of a chip, bytes
DATASET_SIZE = 1_281_167  # ImageNet's; it only weighs the KL
NUM_BLOCKS, NUM_FEATURES, NUM_HEADS, NUM_CLASSES, PATCH, SIDE = 12, 768, 12, 1000, 16, 224
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def classifier() -> mj.Bayesian:
    """ViT-B/16 with all weights random; no class token, the mean over the tokens is its place."""
    network = mj.nn.VisionTransformer(
        image_size=SIDE, patch_size=PATCH, channels=3, num_classes=NUM_CLASSES,
        num_features=NUM_FEATURES, num_heads=NUM_HEADS, num_blocks=NUM_BLOCKS,
        scan=True, remat=True, rngs=nnx.Rngs(0),
    )  # fmt: skip
    return mj.Bayesian(network, mj.Categorical(), structure=mj.Diagonal)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compile the step in a process without chips, and print its cost."""
    del args
    if importlib.util.find_spec("libtpu") is None:
        print(
            "tpu: skipped, for libtpu is not installed; pip install 'moment_jax[tpu]' compiles it here",
            flush=True,
        )
        return {"skipped": "libtpu is not installed"}
    done = fresh(["-m", "experiments.scale.tpu"], WITHOUT_CHIPS)
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    sent = ", ".join(f"{count} {name}" for name, count in record["collectives"].items() if count)
    print(
        f"tpu: ViT-B/16 on {record['topology']}, batch {record['batch']}, compiled in "
        f"{duration(record['seconds_compiling'])}; a chip reserves {record['bytes'] / 1e9:.2f} GB and "
        f"does {record['flops'] / 1e9:.0f} billion operations, loops counted once; {sent}"
    )
    if record["bytes"] > MEMORY:
        raise PartError(f"the step needs {record['bytes'] / 1e9:.1f} GB, a chip has 17.2")
    return record


def compile_step(mesh: Mesh) -> tuple[jax.stages.Compiled, int]:
    """Adam's step on the negative ELBO for a mesh whose devices need not be here, and its batch."""
    graph, params = nnx.split(nnx.eval_shape(classifier))
    optimizer, sizes = optax.adam(1e-3), dict(mesh.shape)

    def step(params: Any, state: Any, images: Array, labels: Array) -> Any:
        def loss(params: Any) -> Array:
            model: mj.Bayesian = nnx.merge(graph, params)
            return -model.elbo(images, labels, dataset_size=DATASET_SIZE)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    def laid(shape: Any, *axes: Any) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

    def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        """By the rules of `mj.parallel`; fields of Python objects are no names."""
        key, index = jax.tree_util.DictKey, jax.tree_util.SequenceKey
        kept = [part for part in path if isinstance(part, key | index)]
        names = [part.key if isinstance(part, key) else part.idx for part in kept]
        return laid(leaf, *mj.parallel.partition_spec(names, leaf.shape, sizes))

    state = params, jax.eval_shape(optimizer.init, params)
    batch = PER_ROW * sizes["data"]
    images = jax.ShapeDtypeStruct((batch, SIDE, SIDE, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    rows = laid(images, "data"), laid(labels, "data")
    given = *jax.tree_util.tree_map_with_path(placed, state), *rows
    return jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile(), batch


def main() -> None:
    """Compile, and print the record in JSON; in a process `WITHOUT_CHIPS`."""
    jax.config.update("jax_exec_time_optimization_effort", -1.0)  # 0 takes several times as long
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    start = time.perf_counter()
    program, batch = compile_step(mj.parallel.make_mesh(None, COLUMNS, devices=devices))
    seconds, text = time.perf_counter() - start, program.as_text() or ""
    memory: Any = program.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    size = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
    sent = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    record = {
        "topology": TOPOLOGY, "batch": batch, "seconds_compiling": seconds, "bytes": size,
        "flops": (program.cost_analysis() or {}).get("flops"), "collectives": sent,
    }  # fmt: skip
    print(json.dumps(record), file=sys.stdout)


if __name__ == "__main__":
    main()
