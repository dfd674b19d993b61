"""Work in fresh processes: with other devices, or without this library."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from experiments.command_line import PartError

ROOT = Path(__file__).parents[2]
# Virtual devices; no times are compared, so compilation may be short.
VIRTUAL = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def fresh(
    words: list[str], environment: Mapping[str, str] | None = None, timeout: float = 3600
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`; a failure is a `PartError` with its reason, the output goes to stderr."""
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise PartError(f"no result after {timeout:.0f} s") from None
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise PartError(why(done.stderr))
    return done


def why(printed: str) -> str:
    """The line of a traceback that names the error, or the last one."""
    lines = [line for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or "RESOURCE_EXHAUSTED" in line]
    return (errors or lines or ["no output"])[-1][:300]
