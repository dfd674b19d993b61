"""Meshes with the axes data, model and optionally sequence, and batches sharded on them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moment_jax.xla import SEQUENCE

DATA, MODEL = "data", "model"


def make_mesh(
    data: int | None = None,
    model: int = 1,
    *,
    sequence: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with the axes `data`, `sequence` (if given) and `model`, of axis type Auto.

    Args:
      data: number of devices that split batches; None for all that are left.
      model: number of devices that split heads, hidden features and vocabularies.
      sequence: number of devices that split the tokens of every sequence, see `by_sequence`; None for a
        mesh without that axis.
      devices: None for all devices of all processes.

    Raises:
      ValueError: if the axes do not multiply to the number of devices.

    >>> make_mesh(1, 1, devices=jax.devices()[:1]).shape["data"]
    1
    """
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    others = model * (1 if sequence is None else sequence)
    rows = count // others if data is None and others >= 1 else data
    if model < 1 or rows is None or rows < 1 or rows * others != count:
        more, got = ("", "") if sequence is None else (" * sequence", f", sequence={sequence}")
        raise ValueError(
            f"`make_mesh` needs data * model{more} == {count}, the number of devices. Got data={data}, "
            f"model={model}{got}. Give fewer by devices=jax.devices()[:n]."
        )
    axes = {DATA: rows} | ({} if sequence is None else {SEQUENCE: sequence}) | {MODEL: model}
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), devices=devices, axis_types=(AxisType.Auto,) * len(axes)
    )


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """The arrays (B, ...) of a pytree, with their leading axis split over `data`.

    Raises:
      ValueError: if the number of devices along `data` does not divide B.
    """
    check_batch("shard_batch", batch, mesh)
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(DATA)))


def check_batch(name: str, batch: Any, mesh: Mesh) -> None:
    """Raise unless the number of devices along `data` divides the leading axis of every array."""
    count = mesh.shape[DATA]
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim == 0 or leaf.shape[0] % count:
            where = jax.tree_util.keystr(path) or "batch"
            raise ValueError(
                f"`{name}` needs a leading axis that the {count} devices along data divide. Got "
                f"{tuple(leaf.shape)} at {where}. Take batches of a multiple of {count}."
            )
