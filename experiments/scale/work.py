"""Operations, memory traffic and collectives of a compiled program, and its least time on a chip."""

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.scale.hlo import Instruction, Lines, Module

# Instructions that move no data.
FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "iota"}
)
FREE |= {"conditional", "call", "after-all", "partition-id", "replica-id", "opt-barrier"}
# Instructions that send, and how XLA for TPU names a fused reduce-scatter.
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SCATTERED = "all-reduce-scatter"


def matrix_flops(module: Module) -> float:
    """Operations of all matrix products, an addition and a multiplication each."""
    kinds = {"dot": _dot_flops, "convolution": _convolution_flops}
    total = 0.0
    for name, times in module.counts().items():
        lines = module.computations[name]
        for line in lines.values():
            if line.opcode in kinds:
                left, right = (lines[one].results[0].dims for one in line.operands[:2])
                total += times * kinds[line.opcode](line, left, right)
    return total


Dims = tuple[int, ...]


def _dot_flops(line: Instruction, left: Dims, right: Dims) -> float:
    contracted = [int(n) for n in re.findall(r"\d+", line.attribute("lhs_contracting_dims"))]
    return 2.0 * math.prod(line.results[0].dims) * math.prod(left[i] for i in contracted)


def _convolution_flops(line: Instruction, left: Dims, right: Dims) -> float:
    """XLA for TPU writes every matrix product as a convolution, batches as padded windows."""
    inputs, kernels, outputs = re.split("_|->", line.attribute("dim_labels"))
    out = line.results[0].dims
    flops = 2.0 * out[outputs.index("b")] * out[outputs.index("f")] * right[kernels.index("i")]
    given = re.findall(r"(\w+)=([\w\-]+)", line.attribute("window"))
    for i in range(len(inputs) - 2):
        axis, window = str(i), {key: value.split("x")[i] for key, value in given}
        size, kernel = left[inputs.index(axis)], right[kernels.index(axis)]
        flops *= _pairs(size, kernel, out[outputs.index(axis)], window)
    return flops


def _pairs(size: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """Number of (output, kernel) positions that meet an entry that is not padding."""
    low = int(window.get("pad", "0_0").split("_")[0])
    stride = int(window.get("stride", 1))
    spread, step = int(window.get("lhs_dilate", 1)), int(window.get("rhs_dilate", 1))
    places = (o * stride + k * step - low for o, k in itertools.product(range(out), range(kernel)))
    return sum(0 <= place <= (size - 1) * spread and place % spread == 0 for place in places)


def hbm_bytes(module: Module) -> float:
    """Bytes read from and written to the large memory, what is fused counted at its edges."""
    fused = module.fused()
    return sum(
        times * _moved(line, module.computations[name], module)
        for name, times in module.counts().items()
        if name not in fused
        for line in module.computations[name].values()
        if line.opcode not in FREE and not line.opcode.endswith("-done")
    )


def _moved(line: Instruction, lines: Lines, module: Module) -> float:
    """Bytes that one instruction reads and writes."""
    reads = [lines[name].results for name in line.operands if name in lines]
    sizes = [float(sum(a.bytes for a in arrays if a.in_hbm)) for arrays in reads]
    # The start of something asynchronous lists what it reads too, and what it waits for.
    results = line.results[:1] if line.opcode.endswith("-start") else line.results
    written = float(sum(a.bytes for a in results if a.in_hbm))
    if line.opcode == "dynamic-slice":
        return 2 * written
    if line.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if line.opcode == "fusion" and line.called:
        inner = module.computations.get(line.called[0], {})
        sizes = [_read(inner, i, size) for i, size in enumerate(sizes)]
        written = min(written, _written(inner, written))
    return sum(sizes) + written


def _readers(inner: Lines, name: str) -> list[tuple[Instruction, str]]:
    """Instructions that read an array, also through bitcasts, and the name they use."""
    found = []
    for line in inner.values():
        if name in line.operands:
            found += _readers(inner, line.name) if line.opcode == "bitcast" else [(line, name)]
    return found


def _read(inner: Lines, index: int, size: float) -> float:
    """Bytes read of a fusion's operand: of a slice, its own; of an array that is updated, none."""
    this = f"parameter({index})"
    names = [
        line.name for line in inner.values() if line.opcode == "parameter" and this in line.text
    ]
    readers = [reader for name in names for reader in _readers(inner, name)]
    total = 0.0
    for line, as_name in readers:
        if line.opcode == "dynamic-slice" and line.operands[0] == as_name:
            total += line.bytes
        elif line.opcode != "dynamic-update-slice" or line.operands[0] != as_name:
            return size
    return min(total, size) if readers else size


def _written(inner: Lines, size: float) -> float:
    """Bytes written by a fusion: where slices of arrays are updated, those of the slices."""
    updates = [line for line in inner.values() if line.opcode == "dynamic-update-slice"]
    if not updates:
        return size
    whole = sum(line.bytes for line in updates)
    parts = sum(inner[line.operands[1]].bytes for line in updates if line.operands[1] in inner)
    return max(size - whole, 0) + parts


def collectives(module: Module, devices: int) -> dict[str, dict[str, float]]:
    """Lines, runs and bytes sent by a device, for each kind of collective of more than one device.

    A device sends (n - 1) / n of the gathered array in a ring of n, as much of what a reduce-scatter
    takes, and both for an all-reduce.
    """
    table: dict[str, dict[str, float]] = {}
    for name, times in module.counts().items():
        lines = module.computations[name]
        for line in lines.values():
            kind, group = line.opcode.removesuffix("-start"), group_size(line, devices)
            if kind not in KINDS or group == 1:
                continue
            if kind == "all-reduce" and name.startswith(SCATTERED):
                kind = "reduce-scatter"
            taken = sum(lines[one].bytes for one in line.operands if one in lines)
            share = (group - 1) / group
            parts = {"all-gather": group - 1, "all-reduce": 2 * share, "collective-permute": 1}
            own = table.setdefault(kind, {"lines": 0, "runs": 0, "bytes": 0})
            own["lines"] += 1
            own["runs"] += times
            own["bytes"] += times * taken * parts.get(kind, share)
    return table


def group_size(line: Instruction, devices: int) -> int:
    """How many devices take part in a collective together."""
    text = line.text
    if line.opcode.startswith("collective-permute"):
        return 2
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return len(listed.group(1).split(","))
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", text)
    if counted:
        return int(counted.group(2))
    named = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text)
    if named:
        sizes = {axis: int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", named.group(1))}
        # An axis may be divided, as 'axis_0':(1)4, and then four of it take part.
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named.group(2))
        return math.prod(int(part) if part else sizes[axis] for axis, part in axes)
    return devices


def sent(record: Mapping[str, Any]) -> float:
    """Bytes that a device sends in a step."""
    return float(sum(kind["bytes"] for kind in record["collectives"].values()))


class Chip(NamedTuple):
    """Peaks of one chip."""

    flops: float  # operations of matrix products a second
    hbm: float  # bytes a second from and to its memory
    link: float  # bytes a second over one link in one direction
    memory: float  # bytes of memory


# 197 TFLOP/s in bfloat16, 16 GiB at 819 GB/s, four links of 400 Gbit/s each, both directions counted.
V5E = Chip(flops=197e12, hbm=819e9, link=45e9, memory=16 * 2**30)


def roofline(record: Mapping[str, Any], chip: Chip = V5E) -> dict[str, Any]:
    """Seconds of each resource, the one that bounds, and the model-FLOPs utilisation that it allows.

    Assumed: matrix products run at the peak of bfloat16 (XLA's default precision on a TPU; storage stays
    float32); all else takes the time of its memory traffic; a collective uses one link in one direction;
    each of the three runs at its peak all the time. "Overlapped": all three at once, so that the slowest
    counts. "In turn": none overlaps another.
    """
    seconds = {
        "matrix products": record["flops"] / chip.flops,
        "memory": record["hbm_bytes"] / chip.hbm,
        "links": sent(record) / chip.link,
    }
    ideal = record["model_flops"] / chip.flops
    bound = max(seconds, key=lambda name: seconds[name])
    return {
        "seconds": seconds,
        "bound": bound,
        "mfu_overlapped": ideal / seconds[bound],
        "mfu_in_turn": ideal / sum(seconds.values()),
        "fits": record["memory"]["reserved"] <= chip.memory,
    }
