"""Results on a mesh of devices; part `devices` runs this in separate processes.

`python -m experiments.scale.device_program OUT LAYOUT,... STRUCTURE [ADDRESS PROCESS PROCESSES]`
writes the loss, the gradients, the state after an update and the output's moments of every case, whole,
to a .npz file. A layout is ROWSxCOLUMNS of devices; 1x1 is one device without a mesh.
"""

import sys
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

BATCH, NUM_TOKENS, NUM_FEATURES, NUM_HEADS, HIDDEN_FEATURES = 8, 5, 16, 8, 16
# With Adam's usual epsilon of 1e-8 the size of a gradient that is zero but for rounding does not matter,
# only its sign: a bias of keys has such a gradient.
ADAM = optax.adam(1e-2, eps=1e-3)


def encoder(structure: type[mj.Covariance]) -> mj.nn.Encoder:
    """One block of eight heads, which eight devices may share.

    Its parameters are float32 numbers in float64 too, so that both can be compared.
    """

    def of(dtype: Any) -> mj.nn.Encoder:
        belief: dict[str, Any] = {"structure": structure, "relative_scale": 0.3, "dtype": dtype}
        blocks = {"hidden_features": HIDDEN_FEATURES, "norm_first": True}
        return mj.nn.Encoder(1, NUM_FEATURES, NUM_HEADS, rngs=nnx.Rngs(0), **belief | blocks)

    dtype = jnp.zeros(()).dtype
    model = of(dtype)
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(of(jnp.float32))))
    return model


def case(structure: type[mj.Covariance], mesh: Mesh | None) -> dict[str, Array]:
    """All results by name, from parameters, an optimizer's state and a batch laid on a mesh."""
    model = encoder(structure)
    optimizer: Any = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (BATCH, NUM_TOKENS, NUM_FEATURES), jnp.float32)
    x = x.astype(jnp.zeros(()).dtype)
    if mesh is not None:
        mj.parallel.shard(model, mesh)
        mj.parallel.shard(optimizer, mesh)
        x = mj.parallel.shard_batch(x, mesh)
        leaves = jax.tree.leaves(nnx.state((model, optimizer)))
        split = sum(not leaf.sharding.is_fully_replicated for leaf in leaves)
        assert split >= 3 * 12, split  # means and scales of six kernels, and Adam's two moments

    def laid(mean: Array, cov: Any) -> Any:
        return (mean, cov) if mesh is None else mj.parallel.constrain(mean, cov, mesh)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Array) -> Any:
        def loss(model: Any) -> Any:
            start = jax.vmap(lambda m: structure.zeros((m.shape[0], m.shape[1]), m.dtype))(x)
            mean, cov = laid(*model(*laid(x, start)))
            variance = jax.vmap(lambda one: one.variance())(cov)
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
    """All cases; the first of several processes writes."""
    if place:
        address, process, processes = place
        jax.distributed.initialize(
            address,
            int(processes),
            int(process),
            coordinator_bind_address=address,
            cluster_detection_method="deactivate",
            initialization_timeout=60,
        )
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
