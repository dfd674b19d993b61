"""The end of a process that does not wait for its work beside the main thread."""

import os
import subprocess
import sys

# The compilation outlives the main thread by far. Ended in the usual way, such a process aborts.
ENDS_EARLY = """
import time, jax, jax.numpy as jnp
from experiments.background import Background, end

def many(x):
    for i in range(1500):
        x = jnp.sin(x @ x) + i
    return x

lowered = jax.jit(many).lower(jnp.ones((4, 4)))
waited_for = Background().start(lowered.compile)
time.sleep(0.5)
print("said")
end(130)
"""


def test_a_process_ends_while_something_is_compiled():
    fresh = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0"}  # or there is nothing to compile
    command = [sys.executable, "-c", ENDS_EARLY]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=fresh
    )
    assert (ended.returncode, ended.stdout) == (130, "said\n"), ended.stderr
