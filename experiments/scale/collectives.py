"""The collectives of a compiled program: their kinds and bytes."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from experiments.scale.hlo import Instruction, Module

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SCATTERED = "all-reduce-scatter"  # how XLA for TPU names a fused reduce-scatter


class Collective(NamedTuple):
    """One line of a program that sends."""

    kind: str
    bytes: float  # that a device sends each time
    times: int
    group: int  # devices that take part together
    line: Instruction


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
