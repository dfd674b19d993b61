"""Train a small Bayesian network on digits over many processes and devices, through crashes.

A supervisor starts the processes, and starts them again from the latest checkpoint when one is lost.
SIGTERM (or Ctrl-C) saves and leaves; the same command then goes on, bit for bit on the same layout.
Exit status: 0 finished, 75 asked to leave by SIGTERM or --stop-at and to be started again, 130 Ctrl-C,
1 not finite or lost too often, 2 bad input.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.command_line import InputError
from experiments.loop import Layout, Order, Saving, supervise
from experiments.loop.layout import check_batch
from experiments.loop.records import METRICS, read_lines
from experiments.outputs import writable_file, writable_folder, write_json
from experiments.resilience_job import REFERENCE
from experiments.resilience_options import add_arguments

__all__ = ["add_arguments", "run"]

SETTINGS = (
    "seed", "steps", "network", "structure", "blocks", "batch_size", "accumulate", "learning_rate",
    "precision",
)  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Check what can be checked, then train, or check by killing."""
    layout = Layout(args.processes, args.devices, args.data, args.model, args.fsdp)
    check_batch(args.batch_size, args.accumulate, {"data": layout.rows})
    if args.stop_at is not None and args.stop_at > args.steps:
        raise InputError(f"--stop-at {args.stop_at} is beyond --steps {args.steps}")
    if args.json is not None:
        writable_file(args.json, "--json")
    folder = writable_folder(args.out, "--out")
    if args.compile_cache is not None:
        writable_folder(args.compile_cache, "--compile-cache")
    if args.check is not None or args.topologies:
        from experiments.resilience_check import check

        check(args, layout)
        return
    supervise(order_of(args, layout, folder))
    last = read_lines(folder / METRICS)[-1]
    if args.json is not None:
        write_json(args.json, {"metrics": last})
    print(f"{last['step']} updates, loss {last['loss']:.4f}; checkpoints and metrics in {folder}")


def order_of(args: argparse.Namespace, layout: Layout, folder: Path) -> Order:
    """What the options order."""
    return Order(
        job=REFERENCE,
        settings={name: getattr(args, name) for name in SETTINGS},
        layout=layout,
        saving=Saving(folder.absolute(), args.save_every, args.stop_at, args.any_version),
        restarts=args.restarts,
        grace=args.grace,
        compile_cache=None if args.compile_cache is None else str(args.compile_cache.absolute()),
    )
