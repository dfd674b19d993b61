"""The collectives of a compiled program: kinds, bytes, and gathers of arrays that should stay split."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from experiments.scale.hlo import Instruction, Module

Dims = tuple[int, ...]

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
FLOATS = ("f32", "bf16", "f16", "f64")
STACK = "all blocks"
SCATTERED = "all-reduce-scatter"  # how XLA for TPU names a fused reduce-scatter


class Collective(NamedTuple):
    """One line of a program that sends."""

    kind: str
    bytes: float  # that a device sends each time
    times: int
    group: int  # devices that take part together
    line: Instruction


class Gather(NamedTuple):
    """A line that makes an array whole on every device, and what that is."""

    what: str
    line: str
    bytes: int
    times: int


def collectives(module: Module, devices: int) -> list[Collective]:
    """All that are run, of more than one device each.

    A device sends (n - 1) / n of the gathered array in a ring of n, as much of what a reduce-scatter
    takes, and both for an all-reduce.
    """
    counts, found = module.counts(), []
    for name, lines in module.computations.items():
        for line in lines.values():
            kind = line.opcode.removesuffix("-start")
            if kind not in KINDS or name not in counts:
                continue
            if kind == "all-reduce" and name.startswith(SCATTERED):
                kind = "reduce-scatter"
            group = group_size(line, devices)
            if group == 1:
                continue
            found.append(
                Collective(kind, _sent(kind, line, lines, group), counts[name], group, line)
            )
    return found


def _sent(kind: str, line: Instruction, lines: dict[str, Instruction], group: int) -> float:
    taken = sum(lines[name].bytes for name in line.operands if name in lines)
    share = (group - 1) / group
    if kind == "all-gather":
        return taken * (group - 1)
    if kind == "all-reduce":
        return 2 * taken * share
    return float(taken) if kind == "collective-permute" else taken * share


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


def by_kind(found: list[Collective]) -> dict[str, dict[str, float]]:
    """Lines, runs and bytes sent by a device, for each kind."""
    table = {}
    for kind in KINDS:
        own = [one for one in found if one.kind == kind]
        if own:
            table[kind] = {
                "lines": len(own),
                "runs": sum(one.times for one in own),
                "bytes": sum(one.times * one.bytes for one in own),
            }
    return table


def whole_arrays(
    found: list[Collective],
    parameters: Mapping[str, Dims],
    covariances: Mapping[str, Dims],
    batch: int,
    rows: int,
) -> list[Gather]:
    """Gathers that make whole, on each device, an array of which a part would do.

    Args:
      found: from `collectives`.
      parameters: what it is -> the shape that no gather may have.
      covariances: what it is -> the shape for one example.
      batch: how many examples a row of devices has.
      rows: devices along `data`. To gather over these what nothing else splits is how FSDP works.
    """
    kernels = {_core(dims): what for what, dims in parameters.items()}
    covs = {_core(dims): what for what, dims in covariances.items()}
    gathers = []
    for one in found:
        if one.kind != "all-gather":
            continue
        for array in one.line.results:
            if array.dtype not in FLOATS:  # numbers of words have the shape of positions
                continue
            dims = tuple(n for n in array.dims if n > 1)
            what = kernels.get(_core(dims))
            if what is not None and one.group == rows and not what.startswith(STACK):
                what = None
            if what is None and len(dims) > 2:  # one axis of examples, wherever XLA has put it
                rest = [(n, dims[:i] + dims[i + 1 :]) for i, n in enumerate(dims) if n <= batch]
                what = next((covs[_core(own)] for _, own in rest if _core(own) in covs), None)
            if what is not None:
                gathers.append(Gather(what, one.line.text[:160], array.bytes, one.times))
                break
    return gathers


def _core(dims: Dims) -> Dims:
    """The axes of a shape that are longer than one, in order of length: XLA may transpose."""
    return tuple(sorted(n for n in dims if n > 1))
