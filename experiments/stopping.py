"""Ctrl-C sets a flag, which a loop reads between its updates.

No exception is raised in the running code: it could be lost in a callback of the garbage collector, and
during a compilation it would shut the interpreter down while XLA's thread runs, which crashes. And while
the main thread waits for XLA, minutes at times, Python runs no handler; so a thread of our own reads the
signal and prints a message.
"""

import os
import signal
import threading
from typing import Any, Self

WAIT = b"\nexperiments: stopping after these updates; press Ctrl-C again to end at once\n"
END = b"\nexperiments: stopped at once; the files and checkpoints written before are whole\n"
INTERRUPTED = 130  # what a shell makes of SIGINT
WRITING, PATIENCE = threading.RLock(), 10.0
"""Held while a file or checkpoint is written: the end at once waits for it, so many seconds."""


class StopRequest:
    """Notes Ctrl-C within the block as `received`; a second one ends the process at once.

    Does nothing outside the main thread, nor where the signal is ignored.

    Args:
      at_once: end at the first Ctrl-C, for there is nothing to save. A nested block overrides this.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once, self.received = at_once, False

    def __enter__(self) -> Self:
        here = threading.current_thread() is threading.main_thread()
        self._heard = here and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
        if self._heard:
            reading, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            self._thread = threading.Thread(target=self._listen, args=(reading,), daemon=True)
            self._thread.start()
            self._told_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._heard:
            signal.signal(signal.SIGINT, self._before)
            signal.set_wakeup_fd(self._told_before)
            os.close(self._writing)
            self._thread.join()

    def _note(self, *_: Any) -> None:
        self.received = True

    def _listen(self, reading: int) -> None:
        """Read signal numbers from the pipe as they come."""
        asked = self._at_once
        while heard := os.read(reading, 1):
            if heard[0] == signal.SIGINT:
                os.write(2, END if asked else WAIT)
                if asked:  # without interpreter shutdown: XLA's threads may still be running
                    WRITING.acquire(timeout=PATIENCE)
                    os._exit(INTERRUPTED)
                asked = True
        os.close(reading)
