"""Meshes with the axes data and model, and batches and moments sharded on them."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import jax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moment_jax.covariance import Covariance

S = TypeVar("S", bound=Covariance)
DATA, MODEL = "data", "model"


def make_mesh(
    data: int | None = None, model: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with the axes `data` and `model`, of axis type Auto.

    Args:
      data: number of devices that split batches; None for all that are left.
      model: number of devices that split heads, hidden features and vocabularies.
      devices: None for all devices of all processes.

    Raises:
      ValueError: if the axes do not multiply to the number of devices.

    >>> make_mesh(1, 1, devices=jax.devices()[:1]).shape["data"]
    1
    """
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    rows = count // model if data is None and model >= 1 else data
    if model < 1 or rows is None or rows < 1 or rows * model != count:
        raise ValueError(
            f"`make_mesh` needs data * model == {count}, the number of devices. Got data={data}, "
            f"model={model}. Give fewer by devices=jax.devices()[:n]."
        )
    return jax.make_mesh(
        (rows, model), (DATA, MODEL), devices=devices, axis_types=(AxisType.Auto,) * 2
    )


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """The arrays (B, ...) of a pytree, with their leading axis split over `data`.

    Raises:
      ValueError: if the number of devices along `data` does not divide B.
    """
    count = mesh.shape[DATA]
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim == 0 or leaf.shape[0] % count:
            where = jax.tree_util.keystr(path) or "batch"
            raise ValueError(
                f"`shard_batch` needs a leading axis that the {count} devices along data divide. Got "
                f"{tuple(leaf.shape)} at {where}. Take batches of a multiple of {count}."
            )
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(DATA)))


def moment_specs(cov: Covariance, *, batched: bool = True) -> Covariance:
    """Partition specs of a covariance, in its structure: batches over `data`, features over `model`.

    Args:
      cov: a covariance.
      batched: whether it has a leading batch axis.
    """
    lead = (DATA,) if batched else ()

    def spec(name: str, leaf: Array) -> PartitionSpec:
        axes: list[str | None] = [None] * (leaf.ndim - len(lead))
        if name in cov.feature_axes:
            axes[cov.feature_axes[name]] = MODEL
        return PartitionSpec(*lead, *axes)

    fields: Any = cov
    specs = {  # a field is an array, or holds some
        field.name: jax.tree.map(partial(spec, field.name), getattr(cov, field.name))
        for field in dataclasses.fields(fields)
    }
    return dataclasses.replace(fields, **specs)


def constrain(mean: Array, cov: S, mesh: Mesh, *, batched: bool = True) -> tuple[Array, S]:
    """The same moments with the shardings of `moment_specs`, inside `jit`.

    Args:
      mean: (B, T, D), or (T, D) without a batch.
      cov: its covariance.
      mesh: from `make_mesh`; its axes must divide B and D.
      batched: whether there is a batch axis.
    """
    lead = (DATA,) if batched else ()
    specs = PartitionSpec(*lead, None, MODEL), moment_specs(cov, batched=batched)
    constrained: tuple[Array, S] = jax.tree.map(
        lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)),
        (mean, cov),
        specs,
    )
    return constrained
