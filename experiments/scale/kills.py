"""Part `kills`: training with Orbax's `CheckpointManager`, which SIGTERM and SIGKILL do not undo.

`python -m experiments.scale.kills FOLDER` is the training: a Bayesian perceptron by the analytic
ELBO, sharded over all devices. It saves every few updates while it goes on, and at once after SIGTERM,
on which it leaves with status 75. The same command goes on from the last checkpoint, whatever ended the
one before, since Orbax names a checkpoint when it is whole. Several processes have to agree on the
update after which they stop: for them `manager.reached_preemption(step)` takes the place of the event.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.command_line import PartError
from experiments.scale import ROOT, VIRTUAL

PREEMPTED = os.EX_TEMPFAIL  # 75: "try again later", the sysexits code for it
STEPS, SAVE_EVERY, KEPT = 200, 10, 2
ROWS, FEATURES, BATCH = 256, 8, 32
ADAM = optax.adam(1e-2)
TERMINATED, KILLED = 60, 120  # updates after which the check sends a signal
PAUSE = 0.03  # seconds after an update of the check, as if the network were larger
LONGEST = 300  # seconds of one training of the check


def make() -> Any:
    """The network."""
    network = mj.nn.MLP([FEATURES, 16, 1], rngs=nnx.Rngs(0))
    return mj.Bayesian(network, mj.Gaussian(), structure=mj.Diagonal)


GRAPH = nnx.graphdef(nnx.eval_shape(make))


def start(key: Array) -> dict[str, Any]:
    """All that a run needs to go on: parameters, optimiser, and the key of the batches."""
    params = nnx.state(make())
    return {"params": params, "optimizer": ADAM.init(params), "key": key}


def data() -> tuple[Array, Array]:
    """Inputs (N, D) and targets (N,)."""
    x = jax.random.normal(jax.random.key(1), (ROWS, FEATURES))
    return x, jnp.sin(x[:, 0]) + x[:, 1] * x[:, 2]


@partial(jax.jit, donate_argnums=0)
def update(state: dict[str, Any], step: Array) -> tuple[dict[str, Any], Array]:
    """One step of Adam; the batch depends on the key and the number of the step alone."""
    x, y = data()
    rows = jax.random.randint(jax.random.fold_in(state["key"], step), (BATCH,), 0, ROWS)

    def loss(params: Any) -> Array:
        model: mj.Bayesian = nnx.merge(GRAPH, params)
        return -model.elbo(x[rows], y[rows], dataset_size=ROWS)

    value, gradient = jax.value_and_grad(loss)(state["params"])
    changes, optimizer = ADAM.update(gradient, state["optimizer"])
    params = optax.apply_updates(state["params"], changes)
    return {"params": params, "optimizer": optimizer, "key": state["key"]}, value


def train(folder: Path, pause: float = 0.0) -> None:
    """Train from the last checkpoint in a folder, or from the start; SystemExit 75 after SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    mesh, key = mj.parallel.make_mesh(model=1), jax.random.key(0)

    def place(leaf: Any) -> jax.NamedSharding:
        divides = leaf.ndim == 2 and leaf.shape[0] % mesh.shape["data"] == 0
        return jax.NamedSharding(mesh, jax.P("data") if divides else jax.P())

    state = jax.device_put(start(key), jax.tree.map(place, jax.eval_shape(start, key)))
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=SAVE_EVERY, max_to_keep=KEPT, cleanup_tmp_directories=True
    )
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        last = manager.latest_step() or 0
        if last:
            state = manager.restore(last, args=ocp.args.StandardRestore(state))
        print(f"from {last}", flush=True)
        for step in range(last + 1, STEPS + 1):
            state, _ = update(state, jnp.int32(step))
            print(step, flush=True)
            time.sleep(pause)
            stopped = stop.is_set()
            # Every few steps, and at once if SIGTERM has come; arrays are copied before this returns.
            saved = ocp.args.StandardSave(state)
            manager.save(step, args=saved, force=stopped or step == STEPS)
            if stopped:
                manager.wait_until_finished()
                print(f"SIGTERM: saved {manager.latest_step()}", flush=True)
                sys.exit(PREEMPTED)
    leaves = jax.tree.leaves(state | {"key": jax.random.key_data(state["key"])})
    print(hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest())


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train without and with two signals; the final states must be the same bit for bit."""
    del args
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        said = [
            _training(whole, 0),
            _training(broken, PREEMPTED, signal.SIGTERM, TERMINATED),
            _training(broken, -signal.SIGKILL, signal.SIGKILL, KILLED),
            _training(broken, 0),
        ]
    went_on = [int(lines[0].removeprefix("from ")) for lines in said]
    saved, same = int(said[1][-1].split()[-1]), said[0][-1] == said[3][-1]  # digests of the states
    print(f"kills: SIGTERM saved update {saved}, from which the next run went on; after SIGKILL at "
          f"update {said[2][-1]} the last went on from {went_on[3]}; its final state is "
          f"{'' if same else 'NOT '}an undisturbed run's bit for bit")  # fmt: skip
    if not same or went_on[:3] != [0, 0, saved] or not went_on[3] >= saved:
        raise PartError(f"runs went on from {went_on}, SIGTERM saved {saved}, states alike: {same}")
    return {"saved_on_sigterm": saved, "went_on_from": went_on, "alike": same}


def _training(folder: Path, status: int, number: int | None = None, at: int = 0) -> list[str]:
    """The lines of a training in a fresh process that gets a signal after an update, if any."""
    command = [sys.executable, "-m", "experiments.scale.kills", str(folder), str(PAUSE)]
    known = {**os.environ, **VIRTUAL, "JAX_NUM_CPU_DEVICES": "2"}
    lines = []
    options: Any = {"cwd": ROOT, "env": known, "stdout": subprocess.PIPE, "text": True}
    # Errors go to a file: a second pipe that nobody reads may fill up.
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stderr=errors, **options) as process,
    ):
        late = threading.Timer(LONGEST, process.kill)
        late.start()
        for line in process.stdout or []:
            lines.append(line.strip())
            if number is not None and lines[-1] == str(at):
                process.send_signal(number)
        late.cancel()
        if process.wait() != status:
            errors.seek(0)
            said = f"{lines[-1:]}, {errors.read()[-300:]}"
            raise PartError(f"a training ended with {process.returncode}, not {status}: {said}")
    return lines


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(float, sys.argv[2:]))
