"""The command line of every experiment: kinds of options, one-line errors and help."""

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

PREEMPTED = os.EX_TEMPFAIL  # 75: "try again later", the sysexits code for it


class InputError(Exception):
    """A file, folder or option is wrong; the message says how to fix it."""


class PartError(Exception):
    """A part of the work failed; the message says which. The rest is done and written."""


class PreemptedError(Exception):
    """Preempted: progress is saved, and the same command continues from there."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors as `InputError`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **options, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        """Raise an `InputError`."""
        raise InputError(f"{message}; see {self.prog} --help")

    def option(
        self, name: str, default: Any, what: str, kind: Callable[[str], Any], unit: str
    ) -> None:
        """Add an option; its help ends with the default, if any."""
        shown = "" if default is None else " (default: %(default)s)"
        self.add_argument(name, type=kind, default=default, metavar=unit, help=what + shown)

    def whole(self, name: str, default: int | None, what: str, *, least: int = 1) -> None:
        """A whole number."""
        self.option(name, default, what, number(int, least=least), "N")

    def real(
        self,
        name: str,
        default: float | None,
        what: str,
        *,
        least: float | None = None,
        unit: str = "X",
    ) -> None:
        """A number above 0, or of at least `least`."""
        kind = number(float, above=0) if least is None else number(float, least=least)
        self.option(name, default, what, kind, unit)

    def choice(
        self, name: str, table: Iterable[str], default: str | Sequence[str] | None, what: str
    ) -> None:
        """One key of a table; several if the default is a list, or None (all)."""
        names = list(table)
        self.add_argument(
            name,
            type=one_of(dict.fromkeys(names), name.lstrip("-")),
            nargs=None if isinstance(default, str) else "+",
            default=names if default is None else default,
            metavar="NAME",
            help=f"{what}: {', '.join(names)} (default: {_shown(default)})",
        )

    def flag(self, name: str, what: str) -> None:
        """A switch, off where it is not named."""
        self.add_argument(name, action="store_true", help=what)

    def place(self, name: str, default: str | None, what: str, *, unit: str = "DIR") -> None:
        """A file or folder."""
        self.option(name, None if default is None else Path(default), what, path, unit)

    def source(self, name: str, what: str) -> None:
        """A required input folder."""
        self.add_argument(name, type=path, required=True, metavar="DIR", help=f"{what} (required)")

    def seed(self, what: str = "random seed") -> None:
        """`--seed N`."""
        self.whole("--seed", 0, what, least=0)

    def out(self, default: str, what: str = "metrics.json, figures and checkpoints") -> None:
        """`--out DIR`."""
        self.place("--out", default, f"folder for {what}")

    def resume(self) -> None:
        """`--resume`."""
        self.flag(
            "--resume",
            "go on from the last checkpoint in --out, with the same other options; without it, an "
            "earlier run's checkpoints there are replaced",
        )

    def training(self, default: str, structures: Iterable[str]) -> None:
        """What all trainings on a fixed split have: `--out`, `--resume`, `--seed`, `--structure`."""
        self.out(default)
        self.resume()
        self.seed("random seed of weights, batches and samples; never of the split")
        self.choice(
            "--structure", structures, "Diagonal", "covariance structure (Diagonal is the fastest)"
        )

    def json(self) -> None:
        """`--json FILE`."""
        what = "write the figures there too (default: nowhere)"
        self.option("--json", None, what, _json_file, "FILE")


def _shown(default: str | Sequence[str] | None) -> str:
    if default is None:
        return "all"
    return default if isinstance(default, str) else " ".join(default)


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
    """A type for `add_argument`: a path; '' is an error, not the working directory."""
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


def writable_folder(path: Path, option: str) -> Path:
    """Create a writable folder and return it; `option` is named in the error (an `InputError`)."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write into {option} {path} ({error.strerror}); name a folder that you may write to"
        ) from error
    return path


def _json_file(text: str) -> Path:
    """A type for `add_argument`: a file that can be written, checked before long work."""
    file = path(text)
    if file.is_dir():
        raise InputError(f"--json {file} is a folder; name a file in it")
    writable_folder(file.parent, "--json")
    return file
