"""Part `devices`: eight virtual devices, and two processes of two, compute what one device does.

They do up to rounding, and rounding is measured: the same numbers on one device in float64 say how far
one device in float32 is from the truth.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import report
from experiments.command_line import PartError

ONE = "1x1"
EIGHT = ("8x1", "1x8", "2x4")
FOUR = ("4x1", "1x4")
FLOAT64 = "float64"  # one device again
TWO = "2x2"  # two processes of two devices, a row each
PROCESSES = 2
COUNTS = (2, 8)  # devices of a process
TOLERANCE = 1e-5  # of the largest entry, in float32
ROUNDING = 3  # or this many times one device's own rounding, if larger
WHAT = ("loss", "mean", "variance", "gradient", "update")
TIMEOUT = 1800
# Virtual devices; no times are compared, so compilation may be short.
VIRTUAL = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def run(structures: Sequence[str]) -> list[dict[str, Any]]:
    """Compare all layouts; one record for each structure and layout."""
    print("largest difference from one device, over the largest entry of an array (float32)")
    records, wrong = [], []
    for structure in structures:  # each is printed when it is there
        results = compute(structure, [ONE, *EIGHT, *FOUR], max(COUNTS))
        two = compute(structure, [TWO], COUNTS[0], processes=PROCESSES)
        exact = compute(structure, [ONE], 1, environment={"JAX_ENABLE_X64": "1"})
        found = differences(
            structure, {**results, f"{PROCESSES} processes": two[TWO], FLOAT64: exact[ONE]}
        )
        rows = [[structure, *WHAT]]
        rows += [[one["layout"], *(f"{one[what]:.1e}" for what in WHAT)] for one in found]
        print(report.aligned(rows), flush=True)
        records += found
        wrong += faults(found)
    if wrong:
        raise PartError(f"devices: {'; '.join(wrong)}")
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
    *,
    processes: int = 1,
    environment: Mapping[str, str] | None = None,
) -> dict[str, dict[str, np.ndarray]]:
    """Results of `device_program`, by layout and name."""
    known = {**os.environ, **VIRTUAL, "JAX_NUM_CPU_DEVICES": str(devices), **(environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.npz"
        words = [str(out), ",".join(layouts), structure]
        command = [sys.executable, "-m", "experiments.scale.device_program", *words]
        address = f"127.0.0.1:{_free_port()}"
        started = [
            subprocess.Popen(
                command + ([address, str(i), str(processes)] if processes > 1 else []),
                cwd=Path(__file__).parents[2],
                env=known,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(processes)
        ]
        try:
            printed = [process.communicate(timeout=TIMEOUT)[0] for process in started]
        except subprocess.TimeoutExpired:
            raise PartError(f"devices: no result after {TIMEOUT} s") from None
        finally:
            for process in started:
                process.kill()
        for process, text in zip(started, printed, strict=True):
            if process.returncode:
                raise PartError(f"devices: a process failed: {text[-1500:]}")
        results: dict[str, dict[str, np.ndarray]] = {}
        with np.load(out) as file:
            for key, value in file.items():
                layout, name = key.split("/")
                results.setdefault(layout, {})[name] = value
        return results


def differences(
    structure: str, results: Mapping[str, Mapping[str, np.ndarray]]
) -> list[dict[str, Any]]:
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
