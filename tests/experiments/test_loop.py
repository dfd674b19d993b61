"""The training loop: resumed is unbroken, bad checkpoints are refused, lost processes start again."""

import dataclasses
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint")

from experiments.command_line import PREEMPTED, InputError, PartError, PreemptedError
from experiments.loop import Layout, Order, fit, store, supervise, supervisor
from experiments.loop.job import batches
from experiments.loop.records import METRICS, open_metrics, read_events, read_lines
from experiments.loop.run import Preemption
from experiments.loop.state import digest
from experiments.loop.store import CHECKPOINTS, steps_on_disk
from tests.experiments.loop_job import job

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def settings_of_a_user():
    with jax.enable_x64(False):
        yield


def train(folder, stop_at=None, every=1, **settings):
    folder.mkdir(exist_ok=True)
    return fit(job(settings), Layout().mesh(), folder, every=every, stop_at=stop_at)


def stopped(folder, stop_at, **settings):
    with pytest.raises(PreemptedError, match=f"after update {stop_at}"):
        train(folder, stop_at, **settings)


def raw(state):
    leaves = jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
    return [np.asarray(leaf) for leaf in leaves]


def metrics(folder):
    return [{**row, "seconds": 0} for row in read_lines(folder / METRICS)]


def listing(folder):
    return {path: path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_resumed_run_is_an_unbroken_one(tmp_path, monkeypatch):
    whole = train(tmp_path / "whole", accumulate=2, every=6)
    stopped(tmp_path / "parts", 3, accumulate=2, every=2)

    def no_code(*_):
        raise AssertionError("a checkpoint is arrays and JSON")

    monkeypatch.setattr(pickle, "loads", no_code)
    monkeypatch.setattr(pickle, "load", no_code)
    parts = train(tmp_path / "parts", accumulate=2, every=2)
    for left, right in zip(raw(whole), raw(parts), strict=True):
        np.testing.assert_array_equal(left, right)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    assert [row["step"] for row in metrics(tmp_path / "parts")] == list(range(1, 7))


def test_accumulated_gradients_are_those_of_the_batch(tmp_path):
    one, two = (train(tmp_path / str(n), accumulate=n, noise=0.0, steps=3, every=3) for n in (1, 2))
    for left, right in zip(raw(one)[:-1], raw(two)[:-1], strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def test_what_is_not_finite_is_named_and_not_saved(tmp_path):
    with pytest.raises(PartError, match=r"update 3: the gradient of bias\.mean.* not finite"):
        train(tmp_path, poison=3)
    assert steps_on_disk(tmp_path) == [1, 2]
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two updates; to take it up again compiles nothing."""
    folder = tmp_path_factory.mktemp("finished")
    with jax.enable_x64(False):
        train(folder, steps=2)
    return folder


def test_checkpoints_of_something_else_are_refused(finished, monkeypatch):
    before = listing(finished)
    for settings, said in (
        ({"batch_size": 4}, "made with batch_size 8, not 4"),
        ({"out": 3}, r"another model: .* is float32\[4\] there, and float32\[3\] here"),
    ):
        with pytest.raises(InputError, match=said):
            train(finished, steps=2, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_version", lambda name: "9")
        with pytest.raises(InputError, match=r"was made with moment_jax .*, not 9"):
            train(finished, steps=2)
    assert before == listing(finished)


# Where one read fails, Orbax closes its event loop over others that are under way, and these say so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["state/**/d/*", "state/manifest.ocdbt", "settings/metadata"])
def test_a_truncated_checkpoint_is_refused(finished, tmp_path, what):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    files = list((folder / CHECKPOINTS / "2").glob(what))
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = listing(folder)
    with pytest.raises(InputError, match=r"truncated or damaged.*remove"):
        train(folder, steps=2)
    time.sleep(0.5)  # for what they say to be said within this test
    assert before == listing(folder)


def test_a_digest_sees_places_and_bits(finished):
    state = train(finished, steps=2)
    assert digest(state) == digest(jax.tree.map(jnp.copy, state))
    place = jax.tree.leaves(state.params)[0].sharding

    def swapped(leaf):
        flat = np.array(leaf).ravel()
        flat[:2] = flat[1::-1]
        return jax.device_put(flat.reshape(leaf.shape), place)

    other = state._replace(params=jax.tree.map(swapped, state.params))
    assert digest(state) != digest(other)


def test_metrics_go_on_where_the_run_does(tmp_path):
    lines = [json.dumps({"step": step}) for step in (1, 2, 3)]
    (tmp_path / METRICS).write_text("\n".join(lines) + '\n{"step": 4, "lo')
    with open_metrics(tmp_path, 2) as file:
        file.write("more\n")
    assert (tmp_path / METRICS).read_text().splitlines() == [*lines[:2], "more"]


def test_an_epoch_reads_every_example_once():
    mesh = Layout().mesh()
    given = dataclasses.replace(job({}), arrays=(np.arange(12),), batch_size=4, accumulate=2)
    found = [np.asarray(batch[0]) for batch in itertools.islice(batches(given, mesh, 0), 6)]
    assert found[0].shape == (2, 2)
    for epoch in (found[:3], found[3:]):
        assert sorted(np.concatenate(epoch).ravel()) == list(range(12))
    assert not np.array_equal(found[:3], found[3:])  # in another order
    for step in (2, 4):
        np.testing.assert_array_equal(next(batches(given, mesh, step))[0], found[step])
    with pytest.raises(InputError, match="smaller --batch-size"):
        next(batches(dataclasses.replace(given, batch_size=16), mesh, 0))


def test_sigterm_in_one_process_is_noticed():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert signal.getsignal(signal.SIGTERM) != before
        assert not preemption.reached(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.reached(2)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_folder_has_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LOCK_TIMEOUT", 0.0)
    with supervisor._locked(tmp_path), pytest.raises(InputError, match="another run is at work"):
        supervise(order(tmp_path, 1))


def order(folder, processes, **settings):
    name = "tests.experiments.loop_job:job"
    return Order(name, settings, Layout(processes), folder, every=15, restarts=1)


class Supervised:
    """A supervisor, here or in a process of its own."""

    def __init__(self, folder, steps):
        folder.mkdir()
        self.folder = folder
        self.order = order(folder, 2, steps=steps)

    def run(self):
        supervise(self.order)

    def start(self):
        command = [sys.executable, "-m", "tests.experiments.loop_job", self.order.to_json()]
        self.process = subprocess.Popen(command, cwd=ROOT)

    def events(self, name):
        return read_events(self.folder, name)

    def wait_for_step(self, step, starts):
        """Until that many starts were made, the last has come that far, and a checkpoint is whole."""
        deadline = time.monotonic() + 600
        while not self.has_come(step, starts):
            assert self.process.poll() is None, self.process.returncode
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def has_come(self, step, starts):
        begun, rows = self.events("start"), metrics(self.folder)
        if len(begun) < starts or not rows or not steps_on_disk(self.folder):
            return False
        return rows[-1]["step"] >= begun[-1]["step"] + step

    def end(self):
        return self.process.wait(timeout=600)


@pytest.mark.slow
def test_a_killed_worker_and_a_preemption_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    whole, broken = Supervised(tmp_path / "whole", 120), Supervised(tmp_path / "broken", 120)
    whole.run()
    broken.start()
    broken.wait_for_step(20, starts=1)
    whole_ones = steps_on_disk(broken.folder)
    os.kill(broken.events("launch")[0]["pids"][1], signal.SIGKILL)
    broken.wait_for_step(20, starts=2)
    asked = time.time()
    broken.process.terminate()
    assert broken.end() == PREEMPTED
    saved = broken.events("saved")[-1]
    assert saved["time"] - asked < 10
    assert metrics(broken.folder)[-1]["step"] == saved["step"] == steps_on_disk(broken.folder)[-1]
    broken.run()
    starts = broken.events("start")
    assert [starts[0]["step"], starts[2]["step"]] == [0, saved["step"]]
    assert starts[1]["step"] >= whole_ones[-1]
    assert starts[2]["digest"] == saved["digest"]
    assert broken.events("over")[0]["codes"][1] == -signal.SIGKILL
    assert whole.events("saved")[-1]["digest"] == broken.events("saved")[-1]["digest"]
    assert metrics(whole.folder) == metrics(broken.folder)
