"""Part `weak`: with as many examples more as devices, a device's share of the program stays the same.

What every device does alike, however many there are (a serial part), and what grows with their number,
show in the compiled program: operations and memory of a device over those of one device alone, and bytes
sent over what sharded parameters have to send, which is (n - 1) / n of a few times their size.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import jax

import moment_jax as mj
from experiments import report
from experiments.command_line import PartError
from experiments.scale.compiled import compile_step
from experiments.scale.layout import Layout
from experiments.scale.networks import SIZES
from experiments.scale.processes import VIRTUAL, fresh
from experiments.scale.work import sent

COUNTS = (1, 2, 4, 8)
GROWTH = 1.02  # what a device's share may grow by
UNEVEN = 1.1  # what the bytes sent, over (n - 1) / n, may differ by


def run(structures: Sequence[str], counts: Sequence[int] = COUNTS) -> list[dict[str, Any]]:
    """Compile for all numbers of devices, one the first, in a process that has as many as the last."""
    words = ["-m", "experiments.scale.weak", json.dumps(counts), *structures]
    done = fresh(words, {**VIRTUAL, "JAX_NUM_CPU_DEVICES": str(max(counts))})
    records: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    print("weak scaling, one device's share of the compiled train step")
    rows = [["", "devices", "batch", "GFLOP", "MB", "sent, MB", "flops / one's", "memory / one's"]]
    print(report.aligned(rows + [_cells(record) for record in records]), flush=True)
    wrong = [fault for record in records for fault in faults(record)]
    wrong += [fault for name in structures for fault in uneven(name, records)]
    if wrong:
        raise PartError("; ".join(wrong))
    return records


def _cells(record: dict[str, Any]) -> list[str]:
    sizes = record["memory"]["reserved"] / 1e6, sent(record) / 1e6
    numbers = *sizes, record["flops_growth"], record["memory_growth"]
    first = [str(record[name]) for name in ("structure", "devices", "batch")]
    return [*first, f"{record['flops'] / 1e9:.4f}", *(f"{number:.3f}" for number in numbers)]


def faults(record: dict[str, Any]) -> list[str]:
    """Faults: quantities of a device that grow with their number."""
    return [
        f"{record['structure']} on {record['devices']} devices: {what} of a device are "
        f"{record[f'{what}_growth']:.3f} times those of one alone"
        for what in ("flops", "memory")
        if record[f"{what}_growth"] > GROWTH
    ]


def uneven(structure: str, records: Sequence[dict[str, Any]]) -> list[str]:
    """Whether the bytes sent grow faster than (n - 1) / n."""
    shares = [
        sent(record) * record["devices"] / (record["devices"] - 1)
        for record in records
        if record["structure"] == structure and record["devices"] > 1
    ]
    if max(shares) <= UNEVEN * min(shares):
        return []
    return [
        f"{structure}: bytes sent, over (n - 1) / n, are from {min(shares):g} to {max(shares):g}"
    ]


def main(counts: str, *structures: str) -> list[dict[str, Any]]:
    """The records, in a process with enough devices."""
    records: list[dict[str, Any]] = []
    for structure in structures:
        first = len(records)
        for count in json.loads(counts):
            mesh = mj.parallel.make_mesh(count, 1, devices=jax.devices()[:count])
            record = compile_step(SIZES["tiny"], structure, Layout(mesh))
            records.append(record)
            alone = records[first]
            record["flops_growth"] = record["flops"] / alone["flops"]
            record["memory_growth"] = record["memory"]["reserved"] / alone["memory"]["reserved"]
    return records


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
