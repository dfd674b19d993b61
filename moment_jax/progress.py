"""No silent wait: what compiles for long says so, and what repeats shows a bar (tqdm, if installed).

Lines go to the logger "moment_jax", whose level is INFO, and from there to stderr;
`logging.getLogger("moment_jax").setLevel("WARNING")` silences them.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax

LONG = 2.0  # seconds of compilation that are told
RATIO = 25  # seconds of compilation after a second of lowering (on CPU, to a factor of 2)

_now = threading.local()  # `what` is compiled, a `timer` for it, `silent`, the `bar`


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what stderr is now."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


logger = logging.getLogger("moment_jax")
if not logger.handlers:
    logger.addHandler(_Stderr())
    logger.handlers[0].setFormatter(logging.Formatter("moment_jax: %(message)s"))
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextlib.contextmanager
def _set(**facts: Any) -> Iterator[None]:
    before = {name: getattr(_now, name, None) for name in facts}
    _now.__dict__.update(facts)
    try:
        yield
    finally:
        _now.__dict__.update(before)


def compiling(what: str) -> Any:
    """A context: programs that are compiled in it and take long are told as this."""
    return _set(what=what, timer=None)


@contextlib.contextmanager
def running(total: int | None, progress: bool | None) -> Iterator[bool]:
    """A context with a bar of so many steps, on stderr; gives whether it is shown.

    Args:
      total: steps that `advance` counts, or None where that is not known.
      progress: whether to show it; None if stderr is a terminal; False silences compilation too.
    """
    shown = sys.stderr.isatty() if progress is None else progress
    bar = None
    if shown:
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=total, leave=False)
    try:
        with _set(bar=bar, silent=progress is False):
            yield shown
    finally:
        if bar is not None:
            bar.close()


def advance(steps: int = 1, **facts: str) -> None:
    """So many steps of the present bar are done; facts stand beside it."""
    bar = getattr(_now, "bar", None)
    if bar is not None:
        bar.update(steps)
        bar.set_postfix(facts)


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    """Told after lowering, just before compilation, and after it."""
    what = getattr(_now, "what", None)
    if what is None or getattr(_now, "silent", None):
        return
    if event.endswith("jaxpr_to_mlir_module_duration"):
        guess = max(RATIO * duration_secs**1.25, 2 * LONG)
        _now.timer = threading.Timer(LONG, logger.info, ("compiling %s, about %.0f s", what, guess))
        _now.timer.daemon = True
        _now.timer.start()
    elif event.endswith("backend_compile_duration") and getattr(_now, "timer", None):
        _now.timer.cancel()
        _now.timer = None
        if duration_secs > LONG:
            logger.info("compiled %s in %.1f s", what, duration_secs)


jax.monitoring.register_event_duration_secs_listener(_listen)
