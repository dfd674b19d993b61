"""What tests of experiments share."""

import jax
import pytest

pytest.importorskip("sklearn", reason="needs moment_jax[experiments]")
pytest.importorskip("matplotlib", reason="needs moment_jax[experiments]")
pytest.importorskip("orbax.checkpoint", reason="needs moment_jax[experiments]")

from experiments import digits
from experiments.__main__ import main
from experiments.training import Task


@pytest.fixture(autouse=True)
def settings_of_a_user():
    """Float32 and free broadcasting, where the tests of the library have neither."""
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def refused(capsys):
    """Asserts that a command ends with status 2 and one line that has these words."""

    def check(arguments, *words):
        capsys.readouterr()  # of what ran before
        assert main([str(argument) for argument in arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert all(word in line for word in words), line

    return check


@pytest.fixture(scope="session")
def main_job(tmp_path_factory):
    """The folder of a tiny main job of two seeds, and how often it compiled a training.

    Its networks have one block: half the compilation.
    """
    folder, compiled = tmp_path_factory.mktemp("digits"), []
    options = "--steps 3 --plain-steps 4 --batch-size 4 --samples 3 --structure Diagonal --seeds 2"
    compile_task = Task.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "NUM_BLOCKS", 1)  # for those too that read the folder
        patch.setattr(digits, "MEMBERS", 2)
        patch.setattr(Task, "compile", lambda *a: compiled.append(a) or compile_task(*a))
        with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
            assert main([*options.split(), "--out", str(folder)]) == 0
        yield folder, len(compiled)
