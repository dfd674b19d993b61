"""Times of compiled functions that are to be compared."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def interleaved(
    functions: dict[str, Callable[[], Any]], repeats: int, limit: float = math.inf
) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that what slows the machine slows all.

    Args:
      functions: each returns when its result is there.
      repeats: timed runs of each, after one that is not counted.
      limit: seconds that the timed runs of one function may take; after three they end there.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for i in range(repeats):
        for name, function in functions.items():
            if i < 3 or sum(times[name]) < limit:
                start = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(taken)) for name, taken in times.items()}
