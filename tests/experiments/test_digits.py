"""The main job at a tiny size, and what a resumed run owes to an unbroken one."""

import functools
import json
import os
import signal
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")

from experiments import data
from experiments.checkpoints import Checkpoints
from experiments.command_line import InputError
from experiments.digits_training import trained as of_main_job
from experiments.outputs import whole_file, write_json
from experiments.training import Task, fit, together

ROOT = Path(__file__).parents[2]
FIGURES = ("doubt.png", "spread.png")


pytestmark = pytest.mark.usefixtures("settings_of_a_user")


def small_task(num_steps):
    """Noisy descent towards one."""

    def loss(params, key, step):
        noise = jax.random.normal(jax.random.fold_in(key, step), (3,))
        return jnp.sum((params["w"] - 1 + 0.1 * noise) ** 2), {}

    return Task("small", loss, optax.adam(0.1), num_steps, lambda p: jnp.sum((p["w"] - 1) ** 2))


@functools.cache
def program():
    """The same for all numbers of updates."""
    task = small_task(1)
    return task.compile(task.start({"w": jnp.zeros(3)}, jax.random.key(0)))


def trained(folder, num_steps, resume=False, settings=None):
    task = small_task(num_steps)
    start = task.start({"w": jnp.zeros(3)}, jax.random.key(0))
    with Checkpoints(folder, settings or {"seed": 0}, resume=resume) as store:
        return fit(task, start, store, save_every=2, compiled=program)


def raw(state):
    keys = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        state,
    )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(keys)]


def test_two_and_two_updates_are_four(tmp_path):
    whole = trained(tmp_path / "whole", 4)
    trained(tmp_path / "halves", 2)
    halves = trained(tmp_path / "halves", 4, resume=True)
    for left, right in zip(raw(whole), raw(halves), strict=True):
        np.testing.assert_array_equal(left, right)
    assert int(halves.step) == 4


def test_a_fresh_start_forgets_earlier_checkpoints(tmp_path):
    trained(tmp_path, 4)
    assert int(trained(tmp_path, 2).step) == 2


def test_other_settings_are_not_resumed(tmp_path):
    trained(tmp_path, 2)
    with pytest.raises(InputError, match="made with seed 0, not 1"):
        trained(tmp_path, 4, resume=True, settings={"seed": 1})
    trained(tmp_path, 2, settings={"structure": "FrozenSeparable"})
    with pytest.raises(InputError, match=r"FrozenSeparable, .* no longer has .*Separable, Full"):
        trained(tmp_path, 4, resume=True, settings={"structure": "Separable"})


@pytest.fixture
def on_a_terminal():
    """Ctrl-C as it is there; what runs in the background, as a suite may, has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("on_a_terminal")
def test_ctrl_c_is_waited_for_and_the_update_saved(tmp_path, monkeypatch, capfd):
    whole = trained(tmp_path / "whole", 6)
    save = Checkpoints.save

    def save_and_press(store, step, state):
        save(store, step, state)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_press)
        with pytest.raises(KeyboardInterrupt, match=r"after update 3 of 6 .* saved in .*--resume"):
            trained(tmp_path / "stopped", 6)
    assert signal.getsignal(signal.SIGINT) is before
    assert "press Ctrl-C again to end at once" in capfd.readouterr().err
    resumed = trained(tmp_path / "stopped", 6, resume=True)
    for left, right in zip(raw(whole), raw(resumed), strict=True):
        np.testing.assert_array_equal(left, right)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def fail():
    raise ValueError("no memory")


@pytest.mark.usefixtures("on_a_terminal")
@pytest.mark.parametrize(
    ("happens", "error", "words"),
    [(press, KeyboardInterrupt, "stopped after update"), (fail, ValueError, "no memory")],
)
def test_ctrl_c_or_an_error_stops_all_that_train_together(tmp_path, happens, error, words):
    task = small_task(10**9)
    # Updates donate all of a state.
    starts = [task.start({"w": jnp.zeros(3)}, jax.random.key(seed)) for seed in range(2)]

    def update(state):
        if int(state.step) == 200:
            happens()
        return program().update(state)

    def train(name, start, update, request):
        with Checkpoints(tmp_path / name, {}, resume=False) as store:
            compiled = program()._replace(update=update)
            return fit(task, start, store, 10**9, lambda: compiled, request)

    one = partial(train, "one", starts[0], update)
    other = partial(train, "other", starts[1], program().update)
    with pytest.raises(error, match=words):
        together([one, other], program)
    saved = {path.parent.name for path in tmp_path.glob("*/*") if path.name.isdigit()}
    assert saved >= ({"other"} if happens is fail else {"one", "other"})


def test_a_log_has_lines(tmp_path, capsys):
    trained(tmp_path, 4)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "small: 0 of 4 steps"
    assert lines[-1].startswith("small: 4 of 4 steps; loss ")


def test_a_file_is_whole_or_not_there(tmp_path):
    def write_half():
        with whole_file(tmp_path / "a.txt") as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert not list(tmp_path.iterdir())
    write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None}


def test_the_split_is_fixed_and_stratified():
    first, second = data.load(), data.load()
    assert [len(part.labels) for part in first[:3]] == [1147, 150, 500]
    np.testing.assert_array_equal(first.test.images, second.test.images)
    assert np.bincount(first.test.labels).min() >= 48
    assert abs(first.train.images.std() - 1) < 1e-4


def test_an_epoch_sees_every_image_once():
    part = data.Images(np.zeros((12, 8, 8), np.float32), np.arange(12, dtype=np.int32))
    seen = [data.mini_batch(jax.random.key(0), jnp.int32(i), part, 4)[1] for i in range(6)]
    for epoch in (seen[:3], seen[3:]):
        assert sorted(np.concatenate(epoch)) == list(range(12))


@pytest.mark.slow
def test_the_main_job(main_job):
    assert main_job.compiled == 2  # one for each network, whatever the number of seeds
    assert "plain network" in main_job.printed
    assert "3 samples" in main_job.printed
    metrics = json.loads((main_job.folder / "metrics.json").read_text())
    assert len(metrics["test"]) == 3
    figures = [value for row in metrics["test"].values() for value in row.values()]
    assert all(np.isfinite([figure["mean"], figure["error"]]).all() for figure in figures)
    first, second = (record["kl"] for record in metrics["seeds"])
    assert metrics["kl"]["mean"] == pytest.approx((first + second) / 2)
    for name, curve in metrics["rotation"].items():
        upright = metrics["test"][name]["nll"]["mean"]
        assert curve["nll"][0]["mean"] == pytest.approx(upright, rel=1e-4)
        assert 0 < curve["entropy"][0]["mean"] <= np.log(10)
    for name in FIGURES:
        assert (main_job.folder / name).stat().st_size > 10_000
    assert not [path for path in main_job.folder.iterdir() if path.name.startswith(".")]
    network, _ = of_main_job(main_job.folder)
    assert float(network.kl()) == pytest.approx(first, rel=1e-4)
