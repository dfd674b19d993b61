"""Work beside the main thread: results, errors, and the end of a process that does not wait for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from experiments.background import Background


def test_results_and_errors_reach_whoever_waits():
    start = Background().start
    half, whole = start(lambda: 1 / 0), start(lambda: 1)
    assert whole() == 1
    with pytest.raises(ZeroDivisionError):
        half()


FRESH = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0"}  # or there is nothing to compile

# The compilation outlives the main thread by far. Ended in the usual way, such a process aborts.
ENDS_EARLY = """
import time, jax, jax.numpy as jnp
from experiments.background import Background, end

def many(x):
    for i in range(1500):
        x = jnp.sin(x @ x) + i
    return x

x = jnp.ones((4, 4))
lowered = jax.jit(many).lower(x)
waited_for = Background().start(lowered.compile)
time.sleep(0.5)
print("said")
end(130)
"""


def test_a_process_ends_while_something_is_compiled():
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_EARLY],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=FRESH,
    )
    assert (ended.returncode, ended.stdout) == (130, "said\n"), ended.stderr
