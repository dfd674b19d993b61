"""Part `tpu`: train steps compiled ahead of time for TPU v5e, moments beside the plain network."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import report
from experiments.command_line import PartError
from experiments.scale.networks import PLAIN, SIZES

NETWORKS = {name: size for name, size in SIZES.items() if name != "tiny"}
TOPOLOGIES = ("v5e:4x4", "v5e:16x16")
MEMORY_RATIO = 3.0  # what the moments' step may take of the plain step's memory
TIMEOUT = 3600
MISSING = (
    "tpu: skipped, for libtpu is not installed; pip install 'moment_jax[tpu]' compiles it here"
)


def installed() -> bool:
    """Whether there is a compiler for TPUs."""
    return importlib.util.find_spec("libtpu") is not None


def run(networks: Sequence[str], structures: Sequence[str]) -> list[dict[str, Any]]:
    """Compile each step in a separate process, and print its cost; faults are raised at the end."""
    if not installed():
        print(MISSING, flush=True)
        return [{"skipped": "libtpu is not installed"}]
    records, wrong = [], []
    for network in networks:
        for topology in TOPOLOGIES:
            plain: dict[str, Any] | None = None
            for structure in (PLAIN, *structures):
                record = compile_one(network, structure, topology)
                records.append(record)
                if "failed" not in record:
                    plain = record if structure == PLAIN else plain
                    record["over_plain"] = over_plain(record, plain)
                _print(record)
                wrong += faults(record)
    if wrong:
        raise PartError(f"tpu: {'; '.join(wrong)}")
    return records


def compile_one(network: str, structure: str, topology: str) -> dict[str, Any]:
    """The record of one compilation; {"failed": why} with its names if there is none."""
    words = [network, structure, topology]
    named = {"network": network, "structure": structure, "topology": topology}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "experiments.scale.tpu_program", *words],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return {**named, "failed": f"no result after {TIMEOUT} s"}
    if done.returncode:
        return {**named, "failed": why(done.stderr)}
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # The partitioner warns on standard error where it had to gather and reshard.
    record["rematerializations"] = done.stderr.count("Involuntary full rematerialization")
    return record


def why(printed: str) -> str:
    """The line of a traceback that names the error, or the last one."""
    lines = [line for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or "RESOURCE_EXHAUSTED" in line]
    return (errors or lines or ["no output"])[-1][:300]


def over_plain(
    record: Mapping[str, Any], plain: Mapping[str, Any] | None
) -> dict[str, float] | None:
    """What a step takes over what the plain one does, in the same layout."""
    if plain is None:
        return None
    ratios = {
        f"memory_{key}": record["memory"][key] / plain["memory"][key] for key in plain["memory"]
    }
    return ratios | {key: record[key] / plain[key] for key in ("flops", "model_flops", "hbm_bytes")}


def faults(record: Mapping[str, Any]) -> list[str]:
    """Faults of a record."""
    name = f"{record['network']} {record['structure']} on {record['topology']}"
    if "failed" in record:
        return [f"{name}: {record['failed']}"]
    found = []
    ratios = record["over_plain"]
    if ratios is not None:
        worst = max(ratios["memory_reserved"], ratios["memory_peak"])
        if worst > MEMORY_RATIO:
            found.append(f"{name}: {worst:.2f} times the memory of the plain step")
    if not record["fits"]:
        found.append(f"{name}: does not fit into the memory of a chip")
    return found


def _print(record: Mapping[str, Any]) -> None:
    head = f"{record['network']}, {record['structure']}, {record['topology']}"
    if "failed" in record:
        print(f"{head}: {record['failed']}\n", flush=True)
        return
    memory, seconds = record["memory"], record["seconds"]
    print(
        f"{head}: {record['rows']} x {record['devices'] // record['rows']} chips, batch "
        f"{record['batch']}; compiled in {record['seconds_compiling']:.0f} s"
    )
    rows = [
        ["  memory of a chip, MB", *(f"{key} {value / 1e6:.0f}" for key, value in memory.items())],
        [
            "  work of a chip",
            f"{record['flops'] / 1e9:.0f} GFLOP",
            f"{record['model_flops'] / 1e9:.0f} without recomputation",
            f"{record['hbm_bytes'] / 1e9:.1f} GB of memory traffic",
            "",
        ],
        [
            f"  at the best, bound by {record['bound']}",
            *(f"{key} {value * 1e3:.1f} ms" for key, value in seconds.items()),
            f"MFU {record['mfu_overlapped']:.3f} ({record['mfu_in_turn']:.3f} in turn)",
        ],
    ]
    for kind, own in record["collectives"].items():
        cells = [f"{own['lines']} lines", f"{own['runs']} runs", f"{own['bytes'] / 1e6:.1f} MB", ""]
        rows.append([f"  {kind}", *cells])
    print(report.aligned(rows))
    ratios = record["over_plain"]
    if record["structure"] != PLAIN and ratios is not None:
        text = ", ".join(f"{key} {value:.2f}" for key, value in ratios.items())
        print(f"  over the plain step: {text}")
    if record["rematerializations"]:
        print(f"  involuntary full rematerializations: {record['rematerializations']}")
    print(flush=True)
