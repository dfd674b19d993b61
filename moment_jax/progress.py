"""No silent wait: what compiles for long says so, and what repeats shows a bar (tqdm, if installed).

`logging.getLogger("moment_jax").setLevel("WARNING")` silences the lines on stderr.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

import jax

LONG = 2.0  # seconds of compilation that are told
_logger = logging.getLogger("moment_jax")
_logger.setLevel(_logger.level or logging.INFO)
_now = threading.local()  # `what` compiles, the `bar`, whether it is `silent`, a `timer`


@contextlib.contextmanager
def running(what: str, total: int = 0, progress: bool | None = None) -> Iterator[bool]:
    """A context that tells what compiles, with a bar of so many steps; gives whether that is shown."""
    before, bar = dict(_now.__dict__), None
    shown = sys.stderr.isatty() if progress is None else progress
    with contextlib.suppress(ImportError):
        if shown and total:
            from tqdm import tqdm

            bar = tqdm(total=total, leave=False)
    _now.__dict__.update(what=what, **{"bar": bar} if total else {})
    _now.silent = progress is False or before.get("silent", False)
    try:
        yield shown
    finally:
        if bar is not None:
            bar.close()
        if timer := _now.__dict__.get("timer"):
            timer.cancel()
        _now.__dict__.clear()
        _now.__dict__.update(before)


def advance(steps: int = 1, **facts: str) -> None:
    """So many steps of the present bar are done; facts stand beside it."""
    if (bar := _now.__dict__.get("bar")) is not None:
        bar.update(steps)
        bar.set_postfix(facts)


def tell(message: str) -> None:
    """A line on stderr."""
    if _logger.isEnabledFor(logging.INFO):
        print(f"moment_jax: {message}", file=sys.stderr)


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    """Told after lowering, just before compilation, and after it."""
    if "what" not in _now.__dict__ or _now.silent:
        return
    if event.endswith("jaxpr_to_mlir_module_duration"):
        guess = max(25 * duration_secs**1.25, 2 * LONG)  # on CPU, to a factor of 2
        line = f"compiling {_now.what}, about {guess:.0f} s"
        _now.timer = threading.Timer(LONG, tell, (line,))
        _now.timer.daemon = True
        _now.timer.start()
    elif event.endswith("backend_compile_duration") and (timer := _now.__dict__.pop("timer", None)):
        timer.cancel()
        if duration_secs > LONG:
            tell(f"compiled {_now.what} in {duration_secs:.1f} s")


jax.monitoring.register_event_duration_secs_listener(_listen)
