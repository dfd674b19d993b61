"""Work beside the main thread: compiling, which leaves Python's lock to others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Does what it is given one after the other, in a thread that the end of the process ends too.

    `concurrent.futures` has no such thread: Ctrl-C would have to wait for a compilation.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def start(self, function: Callable[[], T]) -> Callable[[], T]:
        """Have it done; the result of the call it returns is waited for, and its error raised."""
        future: Future[T] = Future()
        self._tasks.put((future, function))
        return future.result

    def _work(self) -> None:
        while True:
            future, function = self._tasks.get()
            try:
                future.set_result(function())
            except BaseException as error:  # whoever waits for the result has to know
                future.set_exception(error)
