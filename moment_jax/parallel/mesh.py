"""The mesh: devices in rows (data) and columns (model)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

DATA, MODEL = "data", "model"


def make_mesh(
    data: int | None = None, model: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of the axes `data` and `model`, whose shardings the compiler propagates (Auto).

    Args:
      data: devices along which batches are split; None for as many as there are.
      model: devices along which heads, hidden features and vocabularies are split.
      devices: None for all, of all processes.

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
            f"`make_mesh` needs data * model == {count}, the number of devices. Got data={data} and "
            f"model={model}. Give fewer by devices=jax.devices()[:n]."
        )
    return jax.make_mesh(
        (rows, model), (DATA, MODEL), devices=devices, axis_types=(AxisType.Auto,) * 2
    )
