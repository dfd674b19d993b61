"""Part `devices`: eight virtual devices, and two processes of two, compute what one device does.

They do up to rounding, and rounding is measured: the same numbers on one device in float64 say how far
one device in float32 is from the truth.
"""

import socket
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from experiments import report
from experiments.command_line import PartError
from experiments.scale.processes import VIRTUAL, fresh

ONE = "1x1"
LAYOUTS = (ONE, "8x1", "1x8", "2x4", "4x1", "1x4")  # in a process of eight devices
FLOAT64 = "float64"  # one device again
TWO = "2x2"  # two processes of two devices, a row each
TOLERANCE = 1e-5  # of the largest entry, in float32
ROUNDING = 3  # or this many times one device's own rounding, if larger
WHAT = ("loss", "mean", "variance", "gradient", "update")
TIMEOUT = 1800

Results = Mapping[str, np.ndarray]


def run(structures: Sequence[str]) -> list[dict[str, Any]]:
    """Compare all layouts; one record for each structure and layout."""
    print("largest difference from one device, over the largest entry of an array (float32)")
    records, wrong = [], []
    for structure in structures:  # each is printed when it is there
        results = compute(structure, LAYOUTS, 8)
        results["2 processes"] = compute(structure, [TWO], 2, processes=2)[TWO]
        results[FLOAT64] = compute(structure, [ONE], 1, {"JAX_ENABLE_X64": "1"})[ONE]
        found = differences(structure, results)
        rows = [[structure, *WHAT]]
        rows += [[one["layout"], *(f"{one[what]:.1e}" for what in WHAT)] for one in found]
        print(report.aligned(rows), flush=True)
        records += found
        wrong += faults(found)
    if wrong:
        raise PartError("; ".join(wrong))
    return records


def faults(records: Sequence[dict[str, Any]]) -> list[str]:
    """What differs by more than rounding, of one structure's records."""
    (rounding,) = (record for record in records if record["layout"] == FLOAT64)
    return [
        f"{record['structure']} on {record['layout']}: {what} differs from one device's by "
        f"{record[what]:.1e} of its largest entry, and one device's from float64 by {rounding[what]:.1e}"
        for record in records
        for what in WHAT
        if record is not rounding and not record[what] < max(TOLERANCE, ROUNDING * rounding[what])
    ]


def compute(
    structure: str,
    layouts: Sequence[str],
    devices: int,
    environment: Mapping[str, str] | None = None,
    *,
    processes: int = 1,
) -> dict[str, Results]:
    """Results of `device_program`, by layout and name."""
    known = {**VIRTUAL, "JAX_NUM_CPU_DEVICES": str(devices), **(environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.npz"
        words = ["-m", "experiments.scale.device_program", str(out), ",".join(layouts), structure]
        address = f"127.0.0.1:{_free_port()}"
        places = [[address, str(i), str(processes)] for i in range(processes)]
        commands = [words + place for place in places] if processes > 1 else [words]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: fresh(one, known, TIMEOUT), commands))
        results: dict[str, dict[str, np.ndarray]] = {}
        with np.load(out) as file:
            for key, value in file.items():
                layout, name = key.split("/")
                results.setdefault(layout, {})[name] = value
    return {**results}


def differences(structure: str, results: Mapping[str, Results]) -> list[dict[str, Any]]:
    """For each layout and kind of result, the largest difference from one device's."""
    records = []
    for layout in (name for name in results if name != ONE):
        record: dict[str, Any] = {"structure": structure, "layout": layout}
        record |= dict.fromkeys(WHAT, 0.0)
        for name, expected in results[ONE].items():
            size = max(float(np.max(np.abs(expected))), 1e-3)
            error = float(np.max(np.abs(results[layout][name] - expected))) / size
            what = name.split(" ")[0]
            record[what] = max(record[what], error)
        records.append(record)
    return records


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
