"""Part `devices`: eight virtual devices, and two processes of two, compute what one device does.

In float64, where rounding explains next to nothing. `python -m experiments.scale.devices` is a process
of it: OUT LAYOUT,... STRUCTURE [ADDRESS PROCESS PROCESSES]; a layout is ROWSxCOLUMNS of devices.
"""

import argparse
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import moment_jax as mj
from experiments.command_line import PartError
from experiments.outputs import aligned
from experiments.scale import VIRTUAL, fresh

ONE = "1x1"
LAYOUTS = (ONE, "8x1", "1x8", "2x4")  # in a process of eight devices
TWO = "2x2"  # two processes of two devices, a row each
TOLERANCE = 1e-9  # of the largest entry
WHAT = ("loss", "mean", "variance", "gradient", "update")
TIMEOUT = 1800

Results = Mapping[str, np.ndarray]

BATCH, NUM_TOKENS, NUM_FEATURES, NUM_HEADS, HIDDEN_FEATURES = 8, 5, 16, 8, 16
# With Adam's usual epsilon of 1e-8 the size of a gradient that is zero but for rounding does not matter,
# only its sign: a bias of keys has such a gradient.
ADAM = optax.adam(1e-2, eps=1e-3)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare all layouts; one record for each structure and layout."""
    print("largest difference from one device, over the largest entry of an array (float64)")
    records, wrong = [], []
    for structure in dict.fromkeys(args.structure):  # each is printed when it is there
        results = compute(structure, LAYOUTS, 8)
        results["2 processes"] = compute(structure, [TWO], 2, processes=2)[TWO]
        rows = [[structure, *WHAT]]
        for layout in [name for name in results if name != ONE]:
            record = differences(results[layout], results[ONE])
            rows.append([layout, *(f"{record[what]:.1e}" for what in WHAT)])
            records.append({"structure": structure, "layout": layout, **record})
            wrong += [
                f"{structure} on {layout}: {what} differs from one device's by {record[what]:.1e}"
                for what in WHAT
                if not record[what] < TOLERANCE
            ]
        print(aligned(rows), flush=True)
    if wrong:
        raise PartError("; ".join(wrong))
    return records


def compute(
    structure: str, layouts: Sequence[str], devices: int, *, processes: int = 1
) -> dict[str, Results]:
    """Results of `main` in fresh processes, by layout and name."""
    known = {**VIRTUAL, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_ENABLE_X64": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.npz"
        words = ["-m", "experiments.scale.devices", str(out), ",".join(layouts), structure]
        commands = [words]
        if processes > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            commands = [[*words, address, str(i), str(processes)] for i in range(processes)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: fresh(one, known, TIMEOUT), commands))
        results: dict[str, dict[str, np.ndarray]] = {layout: {} for layout in layouts}
        with np.load(out) as file:
            for key, value in file.items():
                layout, name = key.split("/")
                results[layout][name] = value
    return {**results}


def differences(results: Results, expected: Results) -> dict[str, float]:
    """For each kind of result the largest difference, over the largest entry of its array."""
    record = dict.fromkeys(WHAT, 0.0)
    for name, wanted in expected.items():
        size = max(float(np.max(np.abs(wanted))), 1e-3)
        what = name.split(" ")[0]
        record[what] = max(record[what], float(np.max(np.abs(results[name] - wanted))) / size)
    return record


def encoder(structure: type[mj.Covariance]) -> mj.Bayesian:
    """One block of eight heads, which eight devices may share; in float64."""
    blocks: Any = {"hidden_features": HIDDEN_FEATURES, "norm_first": True}
    network = mj.nn.Encoder(1, NUM_FEATURES, NUM_HEADS, rngs=nnx.Rngs(0), **blocks)
    nnx.update(network, jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(network)))
    return mj.Bayesian(network, structure=structure, relative_scale=0.3)


def case(structure: type[mj.Covariance], mesh: Mesh | None) -> dict[str, Array]:
    """All results by name, from parameters, an optimizer's state and a batch laid on a mesh."""
    model = encoder(structure)
    optimizer: Any = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (BATCH, NUM_TOKENS, NUM_FEATURES))
    if mesh is not None:
        mj.parallel.shard(model, mesh)
        mj.parallel.shard(optimizer, mesh)
        x = mj.parallel.shard_batch(x, mesh)
        leaves = jax.tree.leaves(nnx.state((model, optimizer)))
        split = sum(not leaf.sharding.is_fully_replicated for leaf in leaves)
        assert split >= 3 * 12, split  # means and scales of six kernels, and Adam's two moments

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Array) -> Any:
        def loss(model: Any) -> Any:
            found = model(x)
            mean, variance = found.mean, found.variance
            value = jnp.mean(mean**2) + jnp.mean(variance) + 1e-3 * model.kl()
            return value, (mean, variance)

        (value, moments), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return value, moments, gradients, nnx.state((model, optimizer))

    value, (mean, variance), gradients, state = step(model, optimizer, x)
    results = {"loss": value, "mean": mean, "variance": variance}
    for what, tree in (("gradient", gradients), ("update", state)):
        for i, leaf in enumerate(jax.tree.leaves(tree)):
            results[f"{what} {i}"] = leaf
    return results


def main(out: str, layouts: str, structure: str, *place: str) -> None:
    """Write all cases; of several processes the first writes. A layout is ROWSxCOLUMNS of devices."""
    if place:
        address, process, processes = place
        jax.distributed.initialize(
            address, int(processes), int(process), coordinator_bind_address=address,
            cluster_detection_method="deactivate", initialization_timeout=60,
        )  # fmt: skip
    found: dict[str, Any] = {}
    for layout in layouts.split(","):
        rows, columns = (int(n) for n in layout.split("x"))
        mesh = mj.parallel.make_mesh(rows, columns, devices=jax.devices()[: rows * columns])
        results = case(mj.STRUCTURES[structure], mesh if layout != "1x1" else None)
        for what, value in results.items():
            whole = multihost_utils.process_allgather(value, tiled=True) if place else value
            found[f"{layout}/{what}"] = np.asarray(whole)
    if jax.process_index() == 0:
        with Path(out).open("wb") as file:
            np.savez(file, allow_pickle=False, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
