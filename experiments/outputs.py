"""Atomic writes of files."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.command_line import InputError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` if the block succeeds."""
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
