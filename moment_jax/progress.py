"""No silent wait: a bar on stderr, and a line after a compilation of over two seconds.

`logging.getLogger("moment_jax").setLevel("ERROR")` silences both.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax

LONG = 2.0  # seconds
_now = threading.local()  # `what` compiles


def is_shown(asked: bool | None) -> bool:
    """Whether progress is shown: as asked, or if stderr is a terminal and the logger not silenced."""
    loud = logging.getLogger("moment_jax").isEnabledFor(logging.WARNING)
    return (sys.stderr.isatty() and loud) if asked is None else asked


def bar(total: int, unit: str, shown: bool | None) -> Any:
    """A bar of tqdm that goes away when it is closed; None where it is not shown or not installed."""
    if not is_shown(shown):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, unit=unit, leave=False)


def tracked(items: Sequence[Any], unit: str, shown: bool | None) -> Iterator[Any]:
    """The items, with a bar."""
    known = bar(len(items), unit, shown)
    with contextlib.closing(known) if known else contextlib.nullcontext():
        for item in items:
            yield item
            if known:
                known.update()


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """A context in which compilation that takes long is told as this."""
    before, _now.what = getattr(_now, "what", None), what
    try:
        yield
    finally:
        _now.what = before


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    what = getattr(_now, "what", None)
    if what and event.endswith("backend_compile_duration") and duration_secs > LONG:
        line = f"moment_jax: compiled {what} in {duration_secs:.1f} s"
        logging.getLogger("moment_jax").warning(line)


jax.monitoring.register_event_duration_secs_listener(_listen)
