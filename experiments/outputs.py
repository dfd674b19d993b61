"""What an experiment leaves: files that are whole or not there, tables, and figures over seeds."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.command_line import InputError
from experiments.stopping import WRITING


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` if the block succeeds; Ctrl-C waits for its end."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        with WRITING:
            yield temporary
            os.replace(temporary, path)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror}); name a place with room that you may write to"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path | None, content: Any) -> None:
    """Write a JSON file atomically (nothing for no path); arrays become lists, NaN null."""
    if path is None:
        return
    text = json.dumps(_in_json(content), indent=2, allow_nan=False)
    with whole_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def _in_json(content: Any) -> Any:
    if hasattr(content, "_asdict"):  # a NamedTuple
        content = content._asdict()
    if isinstance(content, dict):
        return {str(key): _in_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_in_json(value) for value in content]
    if isinstance(content, Path):
        return str(content)
    if hasattr(content, "tolist"):  # an array, of numpy or JAX
        return _in_json(content.tolist())
    return None if isinstance(content, float) and not math.isfinite(content) else content


def summary(values: list[float]) -> dict[str, float]:
    """Mean and standard error over the seeds; NaN for the error of a single seed."""
    spread = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return {"mean": float(np.mean(values)), "error": float(spread)}


def over_seeds(found: list[Any]) -> Any:
    """The summary of every figure of records of one shape, dictionaries and lists of figures in turn."""
    first = found[0]
    if isinstance(first, dict):
        return {key: over_seeds([one[key] for one in found]) for key in first}
    if isinstance(first, list):
        return [over_seeds(list(values)) for values in zip(*found, strict=True)]
    return summary(found)


def with_error(figure: dict[str, float], form: str = ".3f") -> str:
    """Mean and standard error over seeds; of one seed there is none."""
    error = "" if math.isnan(figure["error"]) else f" ± {figure['error']:{form}}"
    return f"{figure['mean']:{form}}{error}"


def duration(seconds: float) -> str:
    """A time with its unit, as text."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a table: the first column to the left, the others to the right."""
    width, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    cells = ([first.ljust(width), *map(str.rjust, rest, widths)] for first, *rest in rows)
    return "\n".join("  ".join(row).rstrip() for row in cells)
