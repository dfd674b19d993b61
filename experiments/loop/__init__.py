"""A fault-tolerant training loop: processes, sharded state, checkpoints, preemption, relaunch.

A `Job` says what to train, a `Layout` on which processes and devices; `fit` trains it in the processes
that there are, and `supervise` starts those processes, and starts them again when one is lost. A run is
a folder: `checkpoints/`, `metrics.jsonl` (one line for each update) and `events.jsonl`.
"""

from experiments.loop.job import Job
from experiments.loop.layout import Layout
from experiments.loop.run import fit
from experiments.loop.supervisor import Order, supervise

__all__ = ["Job", "Layout", "Order", "fit", "supervise"]
