"""Background work: compilation, which releases Python's lock."""

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
    """End the process; without interpreter shutdown while a thread compiles, which would crash."""
    if all(future.done() for future in _given):
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Background:
    """Runs functions one after the other in a daemon thread.

    `concurrent.futures` has no daemon threads: Ctrl-C would wait for a compilation. Leave the process by
    `end`.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def start(self, function: Callable[[], T]) -> Callable[[], T]:
        """Queue a function. Calling the result waits for its value and raises its error."""
        future: Future[T] = Future()
        _given.append(future)
        self._tasks.put((future, function))
        return future.result

    def _work(self) -> None:
        while True:
            future, function = self._tasks.get()
            try:
                future.set_result(function())
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)
