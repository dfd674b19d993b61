"""Processes and devices of a run, and the mesh that they form."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

import moment_jax as mj
from experiments.command_line import InputError

HOST = "127.0.0.1"
CLUSTER: dict[str, Any] = {
    "cluster_detection_method": "deactivate",
    "initialization_timeout": 120,  # seconds for all processes to join
    "heartbeat_timeout_seconds": 30,  # seconds of silence after which a process counts as lost
    "shutdown_timeout_seconds": 30,
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many processes and devices there are, and how many of them share batches and features."""

    processes: int = 1  # of this run, on this machine
    devices: int = 1  # of each process; on CPU they are virtual
    data: int | None = None  # devices that split a batch; None for all that `model` leaves
    model: int = 1  # devices along which heads and hidden units are split
    fsdp: bool = True  # split the parameters and the optimiser's state over `data` too

    def __post_init__(self) -> None:
        total = self.processes * self.devices
        if self.rows * self.model != total:
            rows = "..." if self.data is None else self.data
            raise InputError(
                f"a mesh of {rows} x {self.model} devices does not match the {total} that there are "
                f"(--processes {self.processes} with --devices {self.devices} each); let --data times "
                f"--model be {total}"
            )

    @property
    def rows(self) -> int:
        """Devices along `data`."""
        total = self.processes * self.devices
        return max(1, total // self.model) if self.data is None else self.data

    def start(self, rank: int, port: int) -> None:
        """Join the other processes; with one process there is nothing to join."""
        if self.processes > 1:
            address = f"{HOST}:{port}"
            jax.distributed.initialize(
                address, self.processes, rank, coordinator_bind_address=address, **CLUSTER
            )

    def mesh(self) -> Mesh:
        """The mesh over the devices of all processes."""
        try:
            return mj.parallel.make_mesh(self.rows, self.model)
        except ValueError as error:
            raise InputError(
                f"{error} (this is --processes {self.processes}, --devices {self.devices})"
            ) from error


def check_batch(size: int, accumulate: int, axes: Mapping[str, int]) -> None:
    """Check that a batch divides evenly over accumulated parts and devices."""
    rows = axes["data"]
    if size % (accumulate * rows):
        raise InputError(
            f"a batch of {size} does not divide into {accumulate} accumulated parts on {rows} devices "
            f"along data; take a --batch-size that is a multiple of {accumulate * rows}"
        )
