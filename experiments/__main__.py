"""`python -m experiments [NAME] [options]`: without a name, the main job."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the rest is imported

import importlib
import io
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from experiments.command_line import InputError, Parser, PartError
from experiments.stopping import INTERRUPTED, StopRequest

COMMANDS = {
    "digits": "train a Bayesian vision Transformer on handwritten digits (the main job)",
    "accuracy": "compare analytic moments with the sampled truth, of trained networks or case files",
    "price": "time, memory, compilation and program of every structure, on this machine",
    "classify": "a Bayesian vision Transformer against ensembles, dropout and Laplace",
    "intents": "tell the intents of texts, and texts that have none (CLINC150's files)",
    "rounding": "predict what weights of few bits or noisy ones do to the loss, and choose bits",
    "uci": "tables: the evidence against MC dropout and Gaussian processes, 20 splits",
    "seq2seq": "forecast hourly temperatures with an encoder-decoder Bayesian Transformer",
    "discrete": "train an autoencoder with categorical codes, against a dense one",
    "brownian": "attention as a Markov chain, tokens as a motion, and which heads matter",
    "optimizers": "compare AdamW, Muon, CG-FAC and K-FAC: updates and seconds to a loss",
    "scale": "many devices and processes, export, a TPU pod, training that survives kills",
}
"""Every experiment: the name of its module, which has `add_arguments(parser)` and `run(args)`."""

DEFAULT_COMMAND = "digits"
TIME_THE_COMPILER = ("price", "scale")


def main(argv: list[str] | None = None) -> int:
    """Run one experiment. Exit status: 1 if a part failed, 2 for bad input, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _run(arguments)
    except (InputError, PartError, KeyboardInterrupt) as error:
        print(f"experiments: {' '.join(str(error).split())}", file=sys.stderr)  # in one line
        return getattr(error, "status", INTERRUPTED)
    except OSError as error:
        # Of the output, say: its reader is gone, as with `head`, or its disk is full.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"experiments: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: list[str]) -> None:
    name = DEFAULT_COMMAND
    if arguments and not arguments[0].startswith("-"):
        name = arguments.pop(0)
    if name not in COMMANDS:
        raise InputError(f"there is no experiment {name!r}; take one of {', '.join(COMMANDS)}")
    listing = "\n".join(f"  {other:11s} {what}" for other, what in COMMANDS.items())
    try:
        experiment = importlib.import_module(f"experiments.{name}")
        parser = Parser(
            prog=f"python -m experiments {name}",
            description=experiment.__doc__,
            epilog=f"experiments (python -m experiments NAME --help explains each):\n{listing}",
        )
        experiment.add_arguments(parser)
        experiment.run(parser.parse_args(arguments))
    except ModuleNotFoundError as error:
        raise InputError(
            f"{name} needs the package {error.name}; pip install 'moment_jax[experiments]'"
        ) from error


def _keep_compiled_programs(arguments: list[str]) -> None:
    """Turn on JAX's persistent compilation cache. Call before JAX is imported.

    Settings of the environment win. Cached programs are executed, so the folder is the user's own.
    Commands that time the compiler use no cache.
    """
    if arguments and arguments[0] in TIME_THE_COMPILER:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(caches / "moment_jax"))
        # jaxlib 0.10 logs a page of machine features, harmless here, for every program that it reads.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def leave(status: int) -> NoReturn:
    """End the process without waiting for threads that still compile."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # a log has what was printed, whenever we end
    with StopRequest(at_once=True):
        _keep_compiled_programs(sys.argv[1:])
        try:
            status = main()
        except Exception:
            traceback.print_exc()
            status = 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # or another one changes the status
    leave(status)
