"""No silent wait: compilation of over two seconds is told, by a line on stderr.

`logging.getLogger("moment_jax").setLevel("ERROR")` silences it.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator

import jax

LONG = 2.0  # seconds
_now = threading.local()  # `what` compiles


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
