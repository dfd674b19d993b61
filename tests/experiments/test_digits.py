"""The main job at a tiny size, what reads its run, and what a resumed run owes to an unbroken one."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments import data
from experiments.__main__ import main
from experiments.checkpoints import Checkpoints
from experiments.command_line import InputError, PartError
from experiments.digits import trained as of_main_job
from experiments.outputs import whole_file, write_json
from experiments.training import Task, fit, together


class Point(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(3, jnp.float32))


def descent(model, key, step):
    """Noisy, towards one."""
    noise = jax.random.normal(jax.random.fold_in(key, step), (3,))
    return jnp.sum((model.w - 1 + 0.1 * noise) ** 2)


def distance(model, _):
    return jnp.sum((model.w - 1) ** 2)


ADAM, KEY = optax.adam(0.1), jax.random.key(0)


def small_task(num_steps):
    return Task("small", descent, ADAM, num_steps, distance)


def trained(folder, num_steps, resume=False, settings=None):
    with Checkpoints(folder, settings or {"seed": 0}, resume=resume) as store:
        model = fit(small_task(num_steps), Point(), KEY, store).model
        return store.latest_step(), model.w[...]


def test_two_and_two_updates_are_four(tmp_path, capsys):
    step, whole = trained(tmp_path / "whole", 4)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "small: 0 of 4 steps"
    assert lines[-1].startswith("small: 4 of 4 steps; loss ")
    trained(tmp_path / "halves", 2)
    assert (trained(tmp_path / "halves", 4, resume=True)[1] == whole).all()
    assert step == 4
    assert trained(tmp_path / "whole", 2)[0] == 2  # a fresh start forgets checkpoints


def test_other_settings_are_not_resumed(tmp_path):
    trained(tmp_path, 2)
    with pytest.raises(InputError, match="made with seed 0, not 1"):
        trained(tmp_path, 4, resume=True, settings={"seed": 1})
    trained(tmp_path, 2, settings={"structure": "FrozenSeparable"})
    with pytest.raises(InputError, match="made with structure FrozenSeparable, not Separable"):
        trained(tmp_path, 4, resume=True, settings={"structure": "Separable"})


@pytest.fixture
def on_a_terminal():
    """Ctrl-C as it is there; what runs in the background, as a suite may, has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def fail(*_):
    raise ValueError("no memory")


@pytest.mark.usefixtures("on_a_terminal")
@pytest.mark.parametrize(
    ("happens", "error", "words"),
    [
        (press, KeyboardInterrupt, "stopped after update .* saved in .*--resume"),
        (fail, ValueError, "no memory"),
    ],
)
def test_ctrl_c_or_an_error_stops_all_that_train_together(tmp_path, capfd, happens, error, words):
    task = small_task(10**9)
    program, begun = task.compile(Point(), KEY).call, threading.Event()

    def advance(state, given, first, count):
        if int(first) == 200:
            assert begun.wait(60)  # the other has something to save
            happens()
        return program(state, given, first, count)

    def goes_on(state, given, first, count):
        found = program(state, given, first, count)
        begun.set()
        return found

    def train(name, advance, request):
        with Checkpoints(tmp_path / name, {}, resume=False) as store:
            return fit(task, Point(), KEY, store, advance, request)

    one, other = partial(train, "one", advance), partial(train, "other", goes_on)
    with pytest.raises(error, match=words):
        together([one, other, partial(train, "late", program)], threads=2)
    assert not (tmp_path / "late").exists()
    assert ("press Ctrl-C again to end at once" in capfd.readouterr().err) == (happens is press)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    saved = {path.parent.name for path in tmp_path.glob("*/*") if path.name.isdigit()}
    assert saved >= ({"other"} if happens is fail else {"one", "other"})


def test_a_checkpoint_that_does_not_fit_is_told_before_it_is_written(tmp_path, monkeypatch):
    state = {"x": jnp.ones(10)}
    with Checkpoints(tmp_path, {}, resume=False) as store:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**19))
        with pytest.raises(InputError, match=r"update 1 .* MB do not fit.* with room"):
            store.keep(1, state)
        assert store.latest_step() is None
        monkeypatch.undo()
        store.keep(1, state)
        assert store.latest_step() == 1


def test_a_file_is_whole_or_not_there(tmp_path):
    with pytest.raises(ValueError, match="no memory"), whole_file(tmp_path / "a.txt") as temporary:
        fail(temporary.write_text("half"))
    with pytest.raises(InputError, match=r"No space left .* with room"), whole_file(tmp_path / "a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())
    write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None}


INTERRUPTED = """
import os, signal, sys, time
from pathlib import Path
from experiments.outputs import whole_file
from experiments.stopping import StopRequest
signal.signal(signal.SIGINT, signal.default_int_handler)
with StopRequest(at_once=True):
    with whole_file(Path(sys.argv[1])) as temporary:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        temporary.write_text("whole")
    time.sleep(60)
"""


def test_ctrl_c_waits_for_a_file_that_is_being_written(tmp_path):
    file = tmp_path / "a.txt"
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, file], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, len(ended.stderr.splitlines())) == (130, 2), ended.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]


def test_a_loss_that_is_no_number_ends_the_training():
    task = Task("small", lambda model, *_: jnp.sum(model.w) / 0, ADAM, 2)
    with pytest.raises(PartError, match="small: the loss is nan after update 2"):
        fit(task, Point(), KEY)


def test_an_epoch_sees_every_image_once():
    part = data.Images(np.zeros((12, 8, 8), np.float32), np.arange(12, dtype=np.int32))
    seen = [data.mini_batch(jax.random.key(0), jnp.int32(i), part, 4)[1] for i in range(6)]
    for epoch in (seen[:3], seen[3:]):
        assert sorted(np.concatenate(epoch)) == list(range(12))


@pytest.mark.slow
def test_the_main_job(main_job):
    folder, compiled = main_job
    assert compiled == 2  # one for each network, whatever the number of seeds
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(metrics["test"]) == 5
    assert len(metrics["validation"]) == 3  # one, several, Bayesian
    assert {*metrics["together"]} > {"2", "3", "one pass of moment_jax", "2 plain networks"}
    first, second = (record["kl"] for record in metrics["seeds"])
    assert metrics["kl"]["mean"] == pytest.approx((first + second) / 2)
    assert len(metrics["seconds"]["compiled"]) == 6
    for name in ("doubt.png", "spread.png", "together.png"):
        assert (folder / name).stat().st_size > 10_000
    network, _ = of_main_job(folder)
    assert float(network.kl()) == pytest.approx(first, rel=1e-4)


@pytest.mark.slow
def test_brownian_of_the_main_job(main_job, tmp_path, capsys):
    small = ["--images", "20", "--run", str(main_job[0]), "--out", str(tmp_path)]
    assert main(["brownian", *small]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["motion"]["sentence"] in capsys.readouterr().out
    for chain in metrics["attention"]["chains"]:
        balanced = chain["detailed_balance_gap"] < 1e-4
        assert balanced == (chain["chain"] == "identity projections")
    for name in ("attention.png", "increments.png"):
        assert (tmp_path / name).stat().st_size > 10_000
