"""Shardings of parameters by layer names: of plain networks, and of `mj.Bayesian`."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moment_jax.parallel.mesh import DATA, MODEL

# Layers with outputs split over `model`, and those that follow, with inputs split over it. Attention
# heads and hidden units thus stay on their device, and a single sum joins them.
SPLITS_OUTPUTS = frozenset({"query", "key", "value", "hidden"})
SPLITS_INPUTS = frozenset({"out", "output"})
TABLES = frozenset({"table", "embedding"})
KERNELS = frozenset({"kernel"}) | TABLES
Path = Sequence[Any]


def partition_spec(
    path: Path, shape: tuple[int, ...], sizes: Mapping[str, int], *, fsdp: bool = True
) -> PartitionSpec:
    """The sharding of a parameter, by the names on its path.

    Over `model`, kernels of queries, keys, values and hidden layers are split by outputs, those of
    output layers by inputs, embedding tables by rows, and Flax's attention kernels by heads. With `fsdp`
    the other axis is split over `data`. Position tables, all rows of which are used at once, are split
    by features. Arrays of one kernel axis (a bias, the variances of `OutputShared`, the
    bases of `KroneckerEigen`) follow that axis. An axis that its devices do not
    divide is not split, and arrays without a rule are replicated. Stacked blocks (`scan=True`) are split
    below their first axis. The parameters of a belief follow the plain network's array, and the leaves
    of an optimizer's state their parameters.

    Args:
      path: names and indices from the module to the array, as in `nnx.to_flat_state`.
      shape: of the array.
      sizes: mesh axis -> number of devices.
      fsdp: split the parameters over `data` too.

    >>> tuple(partition_spec(("query", "kernel", "mean"), (8, 4, 2), {"data": 2, "model": 4}))
    ('data', 'model', None)
    """
    if shape and _is_stacked(path):
        return PartitionSpec(None, *_spec(path, shape[1:], sizes, fsdp))
    return _spec(path, shape, sizes, fsdp)


def _is_stacked(path: Path) -> bool:
    """Whether blocks share an array; else a number follows their name."""
    after = [b for a, b in itertools.pairwise(path) if a == "blocks"]
    return bool(after) and isinstance(after[0], str)


def _spec(
    path: Path, shape: tuple[int, ...], sizes: Mapping[str, int], fsdp: bool
) -> PartitionSpec:
    """The sharding of an array of one layer."""
    names = [name for name in path if isinstance(name, str)]
    array = next((name for name in reversed(names) if name in KERNELS), None)
    if array is None:  # biases of split outputs are split likewise, Flax's by heads
        split = "bias" in names and SPLITS_OUTPUTS.intersection(names)
        return _fit((MODEL, *[None] * (len(shape) - 1)) if split else (), shape, sizes)
    rows, columns = _kernel_axes(names, array)
    if not fsdp:
        rows, columns = (None if axis == DATA else axis for axis in (rows, columns))
    by_name = {"in_basis": (rows, None), "out_basis": (columns, None)}
    by_rank: dict[int, tuple[str | None, ...]] = {1: (columns,), 2: (rows, columns)}
    if SPLITS_OUTPUTS.intersection(names):  # Flax's (features, heads, width)
        by_rank[3] = (rows, columns, None)
    elif SPLITS_INPUTS.intersection(names):  # (heads, width, features)
        by_rank[3] = (rows, None, columns)
    return _fit(by_name.get(names[-1], by_rank.get(len(shape), ())), shape, sizes)


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


def _fit(
    axes: tuple[str | None, ...], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> PartitionSpec:
    """The spec, without the axes that their devices do not divide."""
    if len(axes) != len(shape):
        return PartitionSpec()
    kept = [
        axis if axis is not None and size % sizes.get(axis, 1) == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    return PartitionSpec(*kept)


def shardings(module: nnx.Module, mesh: Mesh, *, fsdp: bool = True) -> dict[Path, NamedSharding]:
    """The sharding of every variable of a module or an optimizer, by path."""
    sizes = dict(mesh.shape)
    return {
        path: NamedSharding(mesh, partition_spec(path, variable[...].shape, sizes, fsdp=fsdp))
        for path, variable in nnx.to_flat_state(nnx.state(module))
        if _is_array(variable[...])
    }


def shard(module: nnx.Module, mesh: Mesh, *, fsdp: bool = True) -> None:
    """Shard the variables of a module or an `nnx.Optimizer` on a mesh, in place.

    Args:
      module: plain, or an `mj.Bayesian`; or an optimizer, after the module that it optimises.
      mesh: from `make_mesh`.
      fsdp: split the parameters over `data` as well as `model`.
    """
    places = shardings(module, mesh, fsdp=fsdp)
    state = nnx.state(module)
    for path, variable in nnx.to_flat_state(state):
        if path in places:
            variable.set_value(jax.device_put(variable[...], places[path]))
    nnx.update(module, state)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array) and not jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )
