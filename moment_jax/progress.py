"""No silent wait: compilation of over two seconds is told on stderr, and what repeats shows a bar.

`logging.getLogger("moment_jax").setLevel("ERROR")` silences the lines; bars need tqdm.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

import jax

LONG = 2.0  # seconds of compilation that are told
_now = (
    threading.local()
)  # of the innermost context: `what` compiles, the `bar`, whether it is `silent`


@contextlib.contextmanager
def running(what: str, total: int = 0, progress: bool | None = None) -> Iterator[bool]:
    """A context that tells what compiles, with a bar of so many steps; gives whether that is shown."""
    before, bars = dict(_now.__dict__), contextlib.ExitStack()
    shown = sys.stderr.isatty() if progress is None else progress
    _now.what, _now.silent = what, progress is False or before.get("silent", False)
    with contextlib.suppress(ImportError):
        if shown and total:
            from tqdm import tqdm

            _now.bar = bars.enter_context(tqdm(total=total, leave=False))
    try:
        with bars:
            yield shown
    finally:
        _now.__dict__.clear()
        _now.__dict__.update(before)


def advance(steps: int = 1, **facts: str) -> None:
    """So many steps of the present bar are done; facts stand beside it."""
    if (bar := getattr(_now, "bar", None)) is not None:
        bar.update(steps)
        bar.set_postfix(facts)


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    told = event.endswith("backend_compile_duration") and duration_secs > LONG
    if told and not getattr(_now, "silent", True):
        line = f"moment_jax: compiled {_now.what} in {duration_secs:.1f} s"
        logging.getLogger("moment_jax").warning(line)


jax.monitoring.register_event_duration_secs_listener(_listen)
