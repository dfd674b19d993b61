"""Preemption by SIGTERM, in one process or in any of many."""

from __future__ import annotations

import signal

import jax
from jax.experimental import multihost_utils

from experiments.stopping import StopRequest


class Preemption(StopRequest):
    """Notices SIGTERM within the block.

    With many processes JAX's own service has the signal, and agrees on an update that none has begun, so
    that all leave at the same one. With one process there is no such service.
    """

    def __init__(self) -> None:
        super().__init__(*([signal.SIGTERM] if jax.process_count() == 1 else []))

    def reached(self, step: int) -> bool:
        """Whether to save and leave after this update; to be asked after every one, in all processes."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self.received is not None
