"""One process of a run, started by a supervisor: `-m experiments.loop.worker RANK PORT ATTEMPT ORDER`.

Exit status: 0 finished, 1 not finite, 2 bad input, 75 preempted, 70 lost another process (restart all).
"""

import importlib
import os
import signal
import sys
import threading
import traceback

import jax

from experiments.command_line import InputError, PartError, PreemptedError
from experiments.loop.records import add_event
from experiments.loop.run import fit
from experiments.loop.supervisor import Order

LOST = os.EX_SOFTWARE


def main(arguments: list[str]) -> int:
    """Join the others, train, and say how it ended."""
    rank, port, attempt = (int(word) for word in arguments[:3])
    order = Order.from_json(arguments[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    try:
        order.layout.start(rank, port)
        module, function = order.job.split(":")
        job = getattr(importlib.import_module(module), function)(order.settings)
        mesh, fsdp = order.layout.mesh(), order.layout.fsdp
        fit(job, mesh, order.folder, every=order.every, stop_at=order.stop_at, fsdp=fsdp)
        status = 0
    except (InputError, PartError, PreemptedError) as error:
        add_event(order.folder, "ended", attempt=attempt, rank=rank, message=str(error))
        status = error.status
    except Exception as error:  # a lost process shows as an error of the step or a barrier
        traceback.print_exc()
        sys.stderr.flush()
        message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        add_event(order.folder, "error", attempt=attempt, rank=rank, message=message)
        os._exit(LOST)  # JAX's own shutdown would wait for the lost process
    if order.layout.processes > 1:
        jax.distributed.shutdown()
    return status


def _end_with_supervisor() -> None:
    """Exit when the supervisor is gone: it holds the other end of our standard input."""
    os.read(0, 1)  # not sys.stdin, whose lock would block our exit
    os._exit(LOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
