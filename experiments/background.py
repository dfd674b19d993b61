"""Work beside the main thread: compiling, which leaves Python's lock to others."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_given: list[Future[Any]] = []  # in this process


def end(status: int) -> NoReturn:
    """End the process. While a thread compiles, take nothing down: it would crash for want of it."""
    if all(future.done() for future in _given):
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Background:
    """Does what it is given one after the other, in a thread that nothing waits for.

    `concurrent.futures` has no such thread: Ctrl-C would have to wait for a compilation. A process that
    may end earlier has to leave by `end`.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def start(self, function: Callable[[], T]) -> Callable[[], T]:
        """Have it done; the result of the call it returns is waited for, and its error raised."""
        future: Future[T] = Future()
        _given.append(future)
        self._tasks.put((future, function))
        return future.result

    def _work(self) -> None:
        while True:
            future, function = self._tasks.get()
            try:
                future.set_result(function())
            except BaseException as error:  # whoever waits for the result has to know
                future.set_exception(error)
