"""What tests of experiments share."""

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

import jax
import pytest


@pytest.fixture
def settings_of_a_user():
    """Float32 and free broadcasting, where the tests of the library have neither."""
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        yield


class Finished(NamedTuple):
    """A finished main job: its folder, what it printed, and how often it compiled a training."""

    folder: Path
    printed: str
    compiled: int


@pytest.fixture(scope="session")
def one_block():
    """The main job's networks have one block: half the compilation."""
    from experiments import digits_training

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits_training, "NUM_BLOCKS", 1)
        yield


@pytest.fixture(scope="session")
def main_job(one_block, tmp_path_factory):
    """A tiny main job of two seeds."""
    from experiments.__main__ import main
    from experiments.training import Task

    folder, printed, compiled = tmp_path_factory.mktemp("digits"), io.StringIO(), []
    options = "--steps 3 --plain-steps 4 --batch-size 4 --samples 3 --structure Diagonal --seeds 2"
    compile_task = Task.compile
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        jax.enable_x64(False),
        jax.numpy_rank_promotion("allow"),
    ):
        patch.setattr(Task, "compile", lambda *a: compiled.append(a) or compile_task(*a))
        assert main([*options.split(), "--out", str(folder)]) == 0
    return Finished(folder, printed.getvalue(), len(compiled))
