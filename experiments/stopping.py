"""Stop requests: Ctrl-C and SIGTERM set a flag, which a loop reads between two updates.

No exception is raised in the running code: it could be lost in a callback of the garbage collector, and
during a compilation it would shut the interpreter down while XLA's thread runs, which crashes. And while
the main thread waits for XLA, minutes at times, Python runs no handler; so a thread of our own reads the
signal and prints a message.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any, NoReturn, Self

WAIT = b"\nexperiments: stopping after this update; press Ctrl-C again to end at once\n"
END = b"\nexperiments: stopped at once; the files and checkpoints written before are whole\n"
INTERRUPTED = 130  # what a shell makes of SIGINT


class StopRequest:
    """Notes signals within the block; a second Ctrl-C ends the process at once.

    Does nothing outside the main thread. A signal that is ignored stays ignored.

    Args:
      numbers: the signals.
      at_once: end at the first Ctrl-C, for there is nothing to save. A nested block overrides this.
    """

    def __init__(self, *numbers: signal.Signals, at_once: bool = False) -> None:
        here = threading.current_thread() is threading.main_thread()
        self._numbers = [n for n in numbers if here and signal.getsignal(n) != signal.SIG_IGN]
        self._at_once = at_once
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        if self._numbers:
            reading, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            self._thread = threading.Thread(target=self._listen, args=(reading,), daemon=True)
            self._thread.start()
            self._told_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._before: list[Any] = [signal.signal(n, self._note) for n in self._numbers]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self._numbers, self._before, strict=True):
            signal.signal(number, handler)
        if self._numbers:
            signal.set_wakeup_fd(self._told_before)
            os.close(self._writing)
            self._thread.join()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

    def _listen(self, reading: int) -> None:
        """Read signal numbers from the pipe as they come."""
        asked = self._at_once
        while heard := os.read(reading, 1):
            if heard[0] != signal.SIGINT:
                continue
            if asked:
                _end()
            asked = True
            os.write(2, WAIT)
        os.close(reading)


def _end() -> NoReturn:
    """End without interpreter shutdown: XLA's threads may still be running."""
    os.write(2, END)
    os._exit(INTERRUPTED)
