"""The command line: help for everything, and one line with the mend for every bad input."""

import importlib
import json
import os
import signal
import subprocess
import sys

import pytest

from experiments.__main__ import COMMANDS, TIME_THE_COMPILER, _keep_compiled_programs, main
from experiments.command_line import Parser


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_explains_every_option(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([*([name] if name else []), "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("show this help", *COMMANDS))
    parser = Parser(prog=name)
    importlib.import_module(f"experiments.{name or 'digits'}").add_arguments(parser)
    assert all(action.help for action in parser._actions)


def test_unknown_names_list_those_there_are(refused):
    refused(["frontier"], "frontier", "digits", "accuracy")
    refused(["accuracy", "--structure", "TokenBlock"], "TokenBlock", "Diagonal")
    refused(["classify", "--data", "letters"], "letters", "digits", "mnist5k")
    refused(["scale", "--part", "weak"], "weak", "devices", "kills")
    refused(["optimizers", "--method", "adamx"], "adamx", "kfac")


def test_a_folder_that_cannot_be_written(refused, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    refused(["--out", file / "below"], "--out", "may write")
    refused(["accuracy", "--json", file / "a.json"], "--json")
    refused(["accuracy", "--json", tmp_path], "--json", "folder")
    refused(["--out", ""], "--out", "needs the path")  # not the working directory
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "mine"


@pytest.mark.parametrize("name", ["digits", "discrete", "seq2seq"])
def test_bad_options_of_a_training(name, refused, tmp_path):
    structures = ("BatchSeparable", "Diagonal", "Separable", "Full")
    for option, value, *words in (
        ("--structure", "BatchSeparable", *structures),
        ("--steps", "x", "whole number"),
        ("--steps", "9" * 400, "2,147,483,647"),
        ("--batch-size", "0", "1 or more"),
        ("--kl-weight", "-1", "0 or more"),
    ):
        refused([name, "--out", tmp_path / "run", option, value], option, *words)
    if name != "seq2seq":  # whose data may be missing, which is told first
        refused([name, "--resume", "--out", tmp_path / "run"], "--resume", "no checkpoint")
    assert not list(tmp_path.iterdir())


def test_what_needs_a_finished_run(refused, tmp_path):
    name = "brownian"
    refused([name, "--run", tmp_path], "no finished run", "--out")
    (tmp_path / "metrics.json").write_text("{")
    refused([name, "--run", tmp_path], "no finished run")
    settings = {"structure": "BatchSeparable", "steps": 1}
    (tmp_path / "metrics.json").write_text(json.dumps({"settings": settings}))
    refused([name, "--run", tmp_path], "no finished run")


def test_programs_are_kept_unless_the_compiler_is_timed(monkeypatch, tmp_path):
    names = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    for command, own, expected in (
        ("digits", None, [str(tmp_path / "moment_jax"), None]),
        ("digits", "mine", ["mine", None]),
        *((name, "mine", ["mine", "0"]) for name in TIME_THE_COMPILER),
    ):
        environment = {} if own is None else {names[0]: own}
        monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path), **environment})
        _keep_compiled_programs([command])
        assert [os.environ.get(name) for name in names] == expected


def test_the_cache_is_set_up_before_jax_is_imported():
    code = "import sys, experiments.__main__; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


STARTING = """
import os, runpy, signal, sys
class Press:
    def find_spec(self, name, *_):
        if name == "argparse":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press())
runpy.run_module("experiments", run_name="__main__")
"""


def test_ctrl_c_while_python_starts_prints_no_traceback():
    ended = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


# The compilation outlives the main thread by far. Ended in the usual way, such a process waits for it.
ENDS_EARLY = """
import time, jax, jax.numpy as jnp
from experiments.__main__ import leave
from experiments.training import in_background

def many(x):
    for i in range(1500):
        x = jnp.sin(x @ x) + i
    return x

lowered = jax.jit(many).lower(jnp.ones((4, 4)))
waited_for = in_background(lowered.compile)
time.sleep(0.5)
print("said")
leave(130)
"""


def test_a_process_ends_while_something_is_compiled():
    fresh = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0"}  # or there is nothing to compile
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_EARLY], capture_output=True, text=True, timeout=120,
        check=False, env=fresh,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (130, "said\n"), ended.stderr
