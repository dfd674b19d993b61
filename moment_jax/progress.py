"""No silent wait: a bar on stderr, and a line when compilation takes over two seconds, and after it.

`logging.getLogger("moment_jax").setLevel("ERROR")` silences both.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
from tqdm import tqdm

LONG = 2.0  # seconds
_now = threading.local()  # `what` compiles, and the `timer` that will say so


def is_shown(asked: bool | None) -> bool:
    """Whether progress is shown: as asked, or if stderr is a terminal and the logger not silenced."""
    loud = logging.getLogger("moment_jax").isEnabledFor(logging.WARNING)
    return (sys.stderr.isatty() and loud) if asked is None else asked


def bar(shown: bool | None, unit: str, items: Any = None, total: int | None = None) -> Any:
    """A bar, over items if there are any, that goes away at its end."""
    return tqdm(items, total=total, unit=unit, leave=False, disable=not is_shown(shown))


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """A context in which compilation that takes long is told as this."""
    before, _now.what = getattr(_now, "what", None), what
    try:
        yield
    finally:
        _now.what = before
        _stop()


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    what, tell = getattr(_now, "what", None), logging.getLogger("moment_jax").warning
    if what and event.endswith("jaxpr_to_mlir_module_duration"):  # compilation begins
        _stop()
        _now.timer = threading.Timer(LONG, tell, [f"moment_jax: compiling {what}"])
        _now.timer.daemon = True
        _now.timer.start()
    elif what and event.endswith("backend_compile_duration"):
        _stop()
        if duration_secs > LONG:
            tell(f"moment_jax: compiled {what} in {duration_secs:.1f} s")


def _stop() -> None:
    timer = getattr(_now, "timer", None)
    if timer is not None:
        timer.cancel()


jax.monitoring.register_event_duration_secs_listener(_listen)
