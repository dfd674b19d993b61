"""What every experiment's command line shares: one-line errors, number types and help."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

PREEMPTED = os.EX_TEMPFAIL  # 75: "try again later", the sysexits code for it


class InputError(Exception):
    """Something from outside (a file, a folder, an option) is wrong; the message says the mend."""


class PartError(Exception):
    """A part of the work failed, and the message says which; the rest is done and written."""


class PreemptedError(Exception):
    """Asked to leave before the end; what is done is saved, and the same command goes on from there."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the exit status 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **options, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        """Raise what was wrong with the command line as an `InputError`."""
        raise InputError(f"{message}; see {self.prog} --help")


def number(
    kind: type[int] | type[float], *, above: float = -math.inf, least: float = -math.inf
) -> Callable[[str], int | float]:
    """A type for `add_argument`: a finite number, `> above` and `>= least`."""
    wanted = "a whole number" if kind is int else "a number"
    if above > -math.inf:
        wanted += f" above {above:g}"
    if least > -math.inf:
        wanted += f", {least:g} or more"

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value <= above or value < least:
            raise argparse.ArgumentTypeError(f"needs {wanted}, got {text!r}")
        return value

    return parse


def path(text: str) -> Path:
    """A type for `add_argument`: a file or folder; no text is none, and not the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("needs the path of a file or folder, got ''")
    return Path(text)


def one_of(table: dict[str, Any], what: str) -> Callable[[str], str]:
    """A type for `add_argument`: a key of `table`; the error lists them."""

    def parse(text: str) -> str:
        if text not in table:
            raise argparse.ArgumentTypeError(
                f"knows no {what} {text!r}; take one of {', '.join(table)}"
            )
        return text

    return parse
