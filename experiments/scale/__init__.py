"""Does it scale? Many devices and processes, export, a TPU pod, and training that survives kills.

Parts: `devices` compares eight virtual devices, and two processes of two, with one device; `export`
saves a predictive function for CPU, CUDA and TPU and calls it from a fresh process; `tpu` compiles a
whole train step for a pod of TPU v5e without one (skipped with a word where libtpu is missing, which is
no failure); `kills` trains with Orbax's CheckpointManager, is ended by SIGTERM and by SIGKILL, and goes
on. Exit status 1 if a part does not show what it should; the others are done and written all the same.
"""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import moment_jax as mj
from experiments.command_line import Parser, PartError, writable_folder
from experiments.outputs import write_json

PARTS = ("devices", "export", "tpu", "kills")
"""Modules with `run(args)`. They are imported when asked for: some run themselves in fresh processes."""

ROOT = Path(__file__).parents[2]
# Virtual devices; no times are compared, so compilation may be short.
VIRTUAL = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def add_arguments(parser: Parser) -> None:
    """The options of the parts."""
    parser.choice("--part", PARTS, None, "parts")
    parser.choice("--structure", mj.STRUCTURES, None, "structures of part devices")
    parser.json()
    parser.place("--out", None, "folder for the exported function (default: none)")


def run(args: argparse.Namespace) -> None:
    """Run all parts, then report failures."""
    if args.out is not None:
        writable_folder(args.out, "--out")
    records, failed = {}, []
    for part in dict.fromkeys(args.part):
        try:
            records[part] = importlib.import_module(f"experiments.scale.{part}").run(args)
        except PartError as error:
            failed.append(f"{part}: {error}")
            records[part] = {"failed": str(error)}
        write_json(args.json, records)
    if failed:
        raise PartError("; ".join(failed))


def fresh(
    words: list[str], environment: Mapping[str, str] | None = None, timeout: float = 3600
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`; a failure is a `PartError` with its reason, the output goes to stderr."""
    known = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=known, capture_output=True, text=True,
            check=False, timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PartError(f"no result after {timeout:.0f} s") from None
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "Error: " in line or "RESOURCE_EXHAUSTED" in line]
        raise PartError((errors or lines or ["no output"])[-1][:300])
    return done
