"""The least time of a program on a chip, from its peak rates.

Assumed: matrix products at the peak of bfloat16 (XLA's default precision on a TPU rounds their operands
to it; what is stored stays float32); all else takes the time of its memory traffic; every collective
uses one link in one direction; each of the three runs at its peak all the time. "Overlapped": the three
go on at once, so that the slowest counts; "in turn": none overlaps another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one chip.

    Args:
      flops: operations of matrix products a second.
      hbm: bytes a second from and to its memory.
      link: bytes a second over one link in one direction.
      memory: bytes of memory.
    """

    flops: float
    hbm: float
    link: float
    memory: float


# 197 TFLOP/s in bfloat16, 16 GiB at 819 GB/s, four links of 400 Gbit/s each, both directions counted.
V5E = Chip(flops=197e12, hbm=819e9, link=45e9, memory=16 * 2**30)


def roofline(record: Mapping[str, Any], chip: Chip = V5E) -> dict[str, Any]:
    """Seconds of each resource, the one that bounds, and the model-FLOPs utilisation that it allows."""
    sent = sum(kind["bytes"] for kind in record["collectives"].values())
    seconds = {
        "matrix products": record["flops"] / chip.flops,
        "memory": record["hbm_bytes"] / chip.hbm,
        "links": sent / chip.link,
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
