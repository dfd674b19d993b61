"""Whether this run has been asked to leave: SIGTERM, in one process or in any of many."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Notices SIGTERM within the block.

    With many processes JAX's own service has the signal, and agrees on an update that none has begun, so
    that all leave at the same one. With one process there is no such service, and a handler does.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None
        self._own = jax.process_count() == 1 and (
            threading.current_thread() is threading.main_thread()
        )

    def reached(self, step: int) -> bool:
        """Whether to save and leave after this update; to be asked after every one, in all processes."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked

    def __enter__(self) -> Self:
        if self._own:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._own:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
