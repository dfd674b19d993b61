"""Does it scale? Sharded results, train steps compiled for TPU pods, export, weak scaling.

Parts: `devices` compares eight virtual devices, and two processes of two, with one device; `tpu`
compiles whole train steps for TPU v5e without one (skipped with a word where libtpu is missing, which
is no failure); `export` saves a predictive function for CPU, CUDA and TPU and calls it from a fresh
process; `weak` compiles for 1 to 8 devices with the batch growing. `weak` and `tpu` take `Diagonal`
unless structures are named. Exit status 1 if a part does not show what it should: a difference of 1e-5,
more than three times the plain step's memory, a device's share that grows;
the other parts are done and written all the same.
"""

import argparse
from collections.abc import Callable
from typing import Any

import moment_jax as mj
from experiments.command_line import InputError, Parser, PartError, writable_folder
from experiments.outputs import write_json
from experiments.scale import devices, export, tpu, weak

PARTS = ("devices", "export", "weak", "tpu")
COMPILED = "Diagonal"  # by parts that only compile, unless structures are named: others take long


def add_arguments(parser: Parser) -> None:
    """The options of the parts."""
    parser.choice("--part", PARTS, None, "parts")
    parser.choice("--structure", mj.STRUCTURES, None, "structures")
    parser.choice("--network", tpu.NETWORKS, None, "networks of part tpu")
    parser.json()
    parser.place("--out", None, "folder for the exported function (default: none)")


def run(args: argparse.Namespace) -> None:
    """Run all parts, then report failures."""
    if args.out is not None:
        writable_folder(args.out, "--out")
    if "export" in args.part and not export.can_save():
        raise InputError(
            "part export needs the package flatbuffers; pip install 'moment_jax[experiments]', or name "
            "other parts with --part"
        )
    every = list(dict.fromkeys(args.structure))
    compiled = [COMPILED] if every == list(mj.STRUCTURES) else every
    one = every[0] if len(every) == 1 else mj.DEFAULT_STRUCTURE.__name__
    runs: dict[str, Callable[[], Any]] = {
        "devices": lambda: devices.run(every),
        "export": lambda: export.run(one, args.out),
        "weak": lambda: weak.run(compiled),
        "tpu": lambda: tpu.run(args.network, compiled),
    }
    records, failed = {}, []
    for part in dict.fromkeys(args.part):
        try:
            records[part] = runs[part]()
        except PartError as error:
            failed.append(f"{part}: {error}")
            records[part] = {"failed": str(error)}
        write_json(args.json, records)
    if failed:
        raise PartError("; ".join(failed))
