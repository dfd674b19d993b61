"""Part `tpu`: train steps compiled ahead of time for TPU v5e, moments beside the plain network."""

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

import moment_jax as mj
from experiments import report
from experiments.command_line import PartError
from experiments.scale.compiled import compile_step
from experiments.scale.layout import Layout
from experiments.scale.networks import PLAIN, SIZES
from experiments.scale.processes import fresh
from experiments.scale.work import roofline

NETWORKS = {name: size for name, size in SIZES.items() if name != "tiny"}
TOPOLOGIES = ("v5e:4x4", "v5e:16x16")
COLUMNS = 2  # chips that share heads and hidden units
# What libtpu asks of a machine without a TPU.
WITHOUT_CHIPS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
}
MEMORY_RATIO = 3.0  # what the moments' step may take of the plain step's memory
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
            plain: dict[str, Any] = {}
            for structure in (PLAIN, *structures):
                record = compile_one(network, structure, topology)
                plain = record if structure == PLAIN else plain
                if plain.keys() & record.keys() >= {"memory"}:
                    record["over_plain"] = over_plain(record, plain)
                records.append(record)
                _print(record)
                wrong += faults(record)
    if wrong:
        raise PartError("; ".join(wrong))
    return records


def compile_one(network: str, structure: str, topology: str) -> dict[str, Any]:
    """The record of one compilation; {"failed": why} with its names if there is none."""
    words = [network, structure, topology]
    try:
        done = fresh(["-m", "experiments.scale.tpu", *words], WITHOUT_CHIPS)
    except PartError as error:
        names = dict(zip(("network", "structure", "topology"), words, strict=True))
        return {**names, "failed": str(error)}
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # The partitioner warns on standard error where it had to gather and reshard.
    record["rematerializations"] = done.stderr.count("Involuntary full rematerialization")
    return record


def over_plain(record: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, float]:
    """What a step takes over what the plain one does, in the same layout."""
    ratios = {f"memory_{key}": own / plain["memory"][key] for key, own in record["memory"].items()}
    return ratios | {key: record[key] / plain[key] for key in ("flops", "model_flops", "hbm_bytes")}


def faults(record: Mapping[str, Any]) -> list[str]:
    """Faults of a record."""
    name = f"{record['network']} {record['structure']} on {record['topology']}"
    if "failed" in record:
        return [f"{name}: {record['failed']}"]
    found, ratios = [], record.get("over_plain", {})
    worst = max(ratios.get("memory_reserved", 0), ratios.get("memory_peak", 0))
    if worst > MEMORY_RATIO:
        found.append(f"{name}: {worst:.2f} times the memory of the plain step")
    if not record["fits"]:
        found.append(f"{name}: does not fit into the memory of a chip")
    return found


def _print(record: Mapping[str, Any]) -> None:
    print(f"{record['network']}, {record['structure']}, {record['topology']}")
    lines = {"failed": record["failed"]} if "failed" in record else _lines(record)
    for label, text in lines.items():
        print(f"  {label}: {text}")
    print(flush=True)


def _lines(record: Mapping[str, Any]) -> dict[str, str]:
    columns = record["devices"] // record["rows"]
    work = {
        "operations": record["flops"],
        "without recomputation": record["model_flops"],
        "bytes of memory traffic": record["hbm_bytes"],
    }
    mfu = {"overlapped": record["mfu_overlapped"], "in turn": record["mfu_in_turn"]}
    return {
        "chips": f"{record['rows']} x {columns}, batch {record['batch']}",
        "compiled in": report.duration(record["seconds_compiling"]),
        "memory of a chip, MB": _said(record["memory"], 1e6),
        "work of a chip, billions": _said(work, 1e9),
        f"at the best, ms, bound by {record['bound']}": _said(record["seconds"], 1e-3),
        "MFU": _said(mfu),
        **{kind: _said(own) for kind, own in record["collectives"].items()},
        "over the plain step": _said(record.get("over_plain", {})),
        "involuntary full rematerializations": str(record["rematerializations"]),
    }


def _said(figures: Mapping[str, float], unit: float = 1) -> str:
    return ", ".join(f"{name} {value / unit:.3g}" for name, value in figures.items())


def main(network: str, structure: str, topology: str) -> dict[str, Any]:
    """The record of one compilation, in a process `WITHOUT_CHIPS`."""
    jax.config.update("jax_exec_time_optimization_effort", -1.0)  # 0 takes several times as long
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = mj.parallel.make_mesh(None, COLUMNS, devices=devices)
    record = compile_step(SIZES[network], structure, Layout(mesh))
    return {"network": network, "topology": topology, **record, **roofline(record)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
