"""Shardings of parameters: rules by the names of layers, for beliefs and plain weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moment_jax.parallel.mesh import DATA, MODEL

# Layers whose outputs are split over `model`, and layers whose inputs then are: heads of attention and
# hidden units of feed-forward layers stay where they are computed, and one sum joins them.
SPLITS_OUTPUTS = frozenset({"query", "key", "value", "hidden"})
SPLITS_INPUTS = frozenset({"out", "output"})
TABLES = frozenset({"table", "embedding"})
KERNELS = frozenset({"kernel"}) | TABLES
Path = Sequence[Any]


def partition_spec(
    path: Path, shape: tuple[int, ...], sizes: Mapping[str, int], *, fsdp: bool = True
) -> PartitionSpec:
    """Where a parameter lies, by the names on its way through the module.

    Kernels of queries, keys, values and hidden layers are split by outputs over `model`, those of output
    layers by inputs, tables of embeddings by rows; with `fsdp` the other axis is split over `data`.
    Flax's own attention, whose kernels have an axis of heads, is split by these. Tables of positions,
    all rows of which are used at once, are split by features. What belongs to one axis of a kernel alone
    (a bias, the variances of `OutputShared`, the factors of `MatrixNormal`) lies as that axis does. An
    axis that its devices do not divide is not split, and what no rule knows lies whole on every device.
    So does the state of an optimizer, whose leaves have the names and the shapes of the parameters that
    they belong to.

    Args:
      path: names and indices from the module to the array, such as those of `nnx.to_flat_state`.
      shape: of the array.
      sizes: axis of the mesh -> number of devices.
      fsdp: split the parameters over `data` too.

    >>> tuple(partition_spec(("query", "kernel", "mean"), (8, 8), {"data": 2, "model": 4}))
    ('data', 'model')
    """
    names = [name for name in path if isinstance(name, str)]
    array = next((name for name in reversed(names) if name in KERNELS), None)
    if array is None:
        return _fit(_vector(names, len(shape)), shape, sizes)
    rows, columns = _kernel_axes(names, array)
    if not fsdp:
        rows, columns = (None if axis == DATA else axis for axis in (rows, columns))
    last = names[-1]
    if last == "rows":  # of a MatrixNormal, (in, in)
        axes: tuple[str | None, ...] = (rows, None)
    elif last == "columns":  # (out, out)
        axes = (columns, None)
    elif len(shape) == 1:  # OutputShared: one number for each output
        axes = (columns,)
    elif len(shape) == 2:
        axes = (rows, columns)
    elif len(shape) == 3 and SPLITS_OUTPUTS.intersection(names):  # Flax's (features, heads, width)
        axes = (rows, columns, None)
    elif len(shape) == 3 and SPLITS_INPUTS.intersection(names):  # (heads, width, features)
        axes = (rows, None, columns)
    else:
        axes = ()
    return _fit(axes, shape, sizes)


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


def _vector(names: Sequence[str], rank: int) -> tuple[str | None, ...]:
    """The axes of what is no kernel: biases of split outputs lie as these do, Flax's by heads."""
    if "bias" in names and SPLITS_OUTPUTS.intersection(names):
        return (MODEL, *[None] * (rank - 1))
    return ()


def _fit(
    axes: tuple[str | None, ...], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> PartitionSpec:
    """The axes that their devices divide."""
    if len(axes) != len(shape):
        return PartitionSpec()
    kept = [
        axis if axis is not None and size % sizes.get(axis, 1) == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    return PartitionSpec(*kept)


def shardings(module: nnx.Module, mesh: Mesh, *, fsdp: bool = True) -> dict[Path, NamedSharding]:
    """Where every variable of a module or an optimizer lies, by its path."""
    sizes = dict(mesh.shape)
    return {
        path: NamedSharding(mesh, partition_spec(path, variable[...].shape, sizes, fsdp=fsdp))
        for path, variable in nnx.to_flat_state(nnx.state(module))
        if _is_array(variable[...])
    }


def shard(module: nnx.Module, mesh: Mesh, *, fsdp: bool = True) -> None:
    """Lay the variables of a module, or of an `nnx.Optimizer`, on the devices of a mesh, in place.

    Args:
      module: of beliefs or plain weights; or an optimizer, after the module that it optimises.
      mesh: from `make_mesh`.
      fsdp: split the parameters over `data` too, and not over `model` alone.
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
