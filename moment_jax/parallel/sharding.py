"""Meshes; where batches and parameters lie on them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moment_jax.covariance.fields import need

Path = Sequence[Any]
DATA, MODEL = "data", "model"

# Layers with outputs split over `model`, and those that follow, with inputs split over it. Attention
# heads and hidden units thus stay on their device, and a single sum joins them.
SPLITS_OUTPUTS = frozenset({"query", "key", "value", "hidden"})
SPLITS_INPUTS = frozenset({"out", "output"})
TABLES = frozenset({"table", "embedding"})
KERNELS = frozenset({"kernel"}) | TABLES


def make_mesh(
    data: int | None = None, model: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with the axes `data` and `model`, of axis type Auto.

    Args:
      data: number of devices that split batches; None for all that are left.
      model: number of devices that split heads, hidden features and vocabularies.
      devices: None for all devices of all processes; ValueError if there are not data * model.
    """
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    rows = count // model if data is None and model >= 1 else data
    right = rows and rows > 0 and model > 0 and rows * model == count
    rule, came = f"data * model == {count}, the number of devices", f"data={data}, model={model}"
    need("make_mesh", right, rule, came, "Give fewer by devices=jax.devices()[:n].")
    shape: Any = rows, model
    kinds = AxisType.Auto, AxisType.Auto
    return jax.make_mesh(shape, (DATA, MODEL), devices=devices, axis_types=kinds)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """The arrays (B, ...) of a pytree, split over `data`, whose number must divide B; or ValueError."""
    count = mesh.shape[DATA]
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        rule = f"a leading axis that the {count} devices along data divide"
        came = f"{leaf.shape} at {jax.tree_util.keystr(path) or 'batch'}"
        right, mend = leaf.ndim and leaf.shape[0] % count == 0, f"Take a multiple of {count}."
        need("shard_batch", right, rule, came, mend)
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(DATA)))


def partition_spec(path: Path, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """The sharding of a parameter of this path, as in `nnx.to_flat_state`, on a mesh of these sizes.

    Over `model`, kernels of queries, keys, values and hidden layers are split by outputs, those of
    output layers by inputs, embedding tables by rows, and Flax's attention kernels by heads; the other
    axis is split over `data` (FSDP). Position tables, all rows of which are used at once, are split by
    features. Arrays of one kernel axis (a bias, the variances of `OutputShared`, the bases of
    `KroneckerEigen`) follow that axis. An axis that its devices do not divide is not split, and arrays
    without a rule are replicated. Stacked blocks (`scan=True`) are split below their first axis. The
    parameters of a belief follow the plain network's array, and the leaves of an optimizer's state their
    parameters.

    >>> tuple(partition_spec(("query", "kernel", "mean"), (8, 4, 2), {"data": 2, "model": 4}))
    ('data', 'model', None)
    """
    after = next((b for a, b in itertools.pairwise(path) if a == "blocks"), 0)
    stacked = bool(shape) and isinstance(after, str)  # blocks share an array; else a number follows
    lead, shape = (None,) * stacked, shape[stacked:]
    names = [name for name in path if isinstance(name, str)]
    array = next((name for name in reversed(names) if name in KERNELS), None)
    splits_outputs = bool(SPLITS_OUTPUTS.intersection(names))
    axes: tuple[str | None, ...] = ()
    if array is not None:
        rows, columns = _kernel_axes(names, array)
        by_name = {"in_basis": (rows, None), "out_basis": (columns, None)}
        by_rank: dict[int, tuple[str | None, ...]] = {1: (columns,), 2: (rows, columns)}
        if splits_outputs:  # Flax's (features, heads, width)
            by_rank[3] = (rows, columns, None)
        elif SPLITS_INPUTS.intersection(names):  # (heads, width, features)
            by_rank[3] = (rows, None, columns)
        axes = by_name.get(names[-1], by_rank.get(len(shape), ()))
    elif "bias" in names and splits_outputs:  # likewise, Flax's by heads
        axes = (MODEL, *[None] * (len(shape) - 1))
    if len(axes) != len(shape):
        return PartitionSpec(*lead)
    fits = (size % sizes.get(axis or "", 1) == 0 for axis, size in zip(axes, shape, strict=True))
    axes = tuple(axis if fit else None for axis, fit in zip(axes, fits, strict=True))
    return PartitionSpec(*lead, *axes)


def _kernel_axes(names: Sequence[str], array: str) -> tuple[str | None, str | None]:
    """The mesh axes of a kernel's inputs and outputs."""
    if "positions" in names:
        return DATA, MODEL
    if array in TABLES:
        return MODEL, DATA
    if SPLITS_OUTPUTS.intersection(names):
        return DATA, MODEL
    if SPLITS_INPUTS.intersection(names):
        return MODEL, DATA
    return DATA, None


def shardings(module: nnx.Module, mesh: Mesh) -> dict[Path, NamedSharding]:
    """The sharding of every variable of a module or an optimizer, by path; see `partition_spec`."""
    sizes, found = dict(mesh.shape), dict[Path, NamedSharding]()
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        value = variable.get_value()
        dtype = getattr(value, "dtype", None)
        if isinstance(value, jax.Array) and not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            found[path] = NamedSharding(mesh, partition_spec(path, value.shape, sizes))
    return found


def shard(module: nnx.Module, mesh: Mesh) -> None:
    """Place the variables of a module as `shardings` says, in place, on a mesh of `make_mesh`.

    The module is plain, or an `mj.Bayesian`; or an optimizer, after the module that it optimises.
    """
    places = shardings(module, mesh)
    state = nnx.state(module)
    for path, variable in nnx.to_flat_state(state):
        if path in places:
            variable.set_value(jax.device_put(variable[...], places[path]))
    nnx.update(module, state)
