"""Atomic writes of files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.command_line import InputError


def writable_folder(path: Path, option: str) -> Path:
    """Create a writable folder and return it.

    Raises:
      InputError: if it cannot be written; nothing is left behind.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write into {option} {path} ({error.strerror}); name a folder that you may write to"
        ) from error
    return path


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` if the block succeeds.

    Raises:
      InputError: if the file cannot be written.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror}); name a place that you may write to"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def writable_file(path: Path, option: str) -> Path:
    """Check, before long work, that a file can be written.

    Raises:
      InputError: if not.
    """
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; name a file in it")
    writable_folder(path.parent, option)
    return path


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically; arrays and records as lists and objects, NaN as null."""
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
