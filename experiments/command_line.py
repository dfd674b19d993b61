"""The command line of every experiment: kinds of options, one-line errors and help."""

import argparse
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn


class InputError(Exception):
    """A file, folder or option is wrong; the message says how to fix it."""

    status = 2  # of the process


class PartError(Exception):
    """A part of the work failed; the message says which. The rest is done and written."""

    status = 1


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

    def whole(
        self, name: str, default: int | None, what: str, *, least: int = 1, most: int = 2**31 - 1
    ) -> None:
        """A whole number, of 32 bits."""
        self.option(name, default, what, number(int, least=least, most=most), "N")

    def gib(self, name: str, default: float | None, what: str) -> None:
        """A size above 0, in GiB."""
        self.option(name, default, what, number(float, above=0), "GIB")

    def choice(
        self, name: str, table: Iterable[str], default: str | Sequence[str] | None, what: str
    ) -> None:
        """One key of a table; several if the default is a list, or None (all)."""
        names, several = list(table), not isinstance(default, str)
        chosen = "all" if default is None else " ".join(default) if several else default
        shown = f" (default: {chosen})" if chosen else ""
        self.add_argument(
            name, choices=names, nargs="+" if several else None, metavar="NAME",
            default=names if default is None else default,
            help=f"{what}: {', '.join(names)}{shown}",
        )  # fmt: skip

    def place(self, name: str, default: str | None, what: str) -> None:
        """A folder."""
        self.option(name, None if default is None else Path(default), what, path, "DIR")

    def sets(self, what: str, default: str, *, required: bool = True) -> None:
        """`--data-dir DIR` and `--set NAME ...`, to be found by `named_files`."""
        self.add_argument("--data-dir", type=path, required=required, metavar="DIR", help=what)
        what = f"which files, by their names without the ending (default: {default})"
        self.add_argument("--set", nargs="+", metavar="NAME", help=what)

    def seed(self, what: str = "random seed") -> None:
        """`--seed N`."""
        self.whole("--seed", 0, what, least=0, most=10**9)

    def out(self, default: str, what: str = "metrics.json, figures and checkpoints") -> None:
        """`--out DIR`."""
        self.place("--out", default, f"folder for {what}")

    def training(self, out: str, *, steps: int, batch_size: int, kl_weight: float) -> None:
        """What all trainings of a Bayesian network on a fixed split have, with its defaults."""
        import moment_jax as mj  # not above: `__main__` sets up JAX's cache before JAX is imported

        self.out(out)
        what = (
            "go on from the last checkpoint in --out, with the same other options; without it, an "
            "earlier run's checkpoints there are replaced"
        )
        self.add_argument("--resume", action="store_true", help=what)
        self.seed("random seed of weights, batches and samples; never of the split")
        self.choice("--structure", mj.STRUCTURES, "Separable", "covariance structure")
        self.whole("--steps", steps, "updates of the Bayesian network")
        self.whole("--batch-size", batch_size, "training examples for each update")
        what = "weight of the KL in the end: 1 is Bayes' rule, less a cold posterior"
        self.option("--kl-weight", kl_weight, what, number(float, least=0), "X")

    def json(self) -> None:
        """`--json FILE`."""
        what = "write the figures there too (default: nowhere)"
        self.option("--json", None, what, _json_file, "FILE")


def number(
    kind: type[int] | type[float], *, above: float = -math.inf, least: float = -math.inf,
    most: float = math.inf,
) -> Callable[[str], int | float]:  # fmt: skip
    """A type for `add_argument`: a finite number, `> above`, `>= least` and `<= most`."""
    wanted = "a whole number" if kind is int else "a number"
    if above > -math.inf:
        wanted += f" above {above:g}"
    if least > -math.inf:
        wanted += f", {least:g} or more"
    if most < math.inf:
        wanted += f", at most {most:,}"

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most and value > above and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"needs {wanted}, got {text[:40]!r}")
        return value

    return parse


def path(text: str) -> Path:
    """A type for `add_argument`: a path; '' is an error, not the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("needs the path of a file or folder, got ''")
    return Path(text)


def named_files(args: argparse.Namespace, ending: str) -> list[Path]:
    """The files in --data-dir that --set names; without it all with this ending."""
    folder, names = args.data_dir, args.set
    if not folder.is_dir():
        raise InputError(f"--data-dir {folder} is no folder; name one of {ending} files")
    there = sorted(path.stem for path in folder.glob(f"*{ending}"))
    if not there:
        raise InputError(f"--data-dir {folder} holds no {ending} files; see --help")
    return [folder / f"{name}{ending}" for name in chosen(names, there, folder)]


def chosen(names: list[str] | None, there: Iterable[str], place: Any) -> list[str]:
    """What --set names of the sets in a place, each once; all without names."""
    for name in names or ():
        if name not in there:
            raise InputError(f"--set {name} is not in {place}; take one of {', '.join(there)}")
    return list(dict.fromkeys(names or there))


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
