"""The command line: help for everything, and one line with the mend for every bad input."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")

from experiments.__main__ import COMMANDS, TIME_THE_COMPILER, _keep_compiled_programs, main
from experiments.command_line import Parser, number
from tests.experiments.case_files import block_arrays, mlp_arrays


def fails(capsys, arguments, *words):
    """The experiment ends with status 2 and one line that has these words."""
    assert main([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_explains_every_option(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "show this help" in said
    assert all(name in said for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help(name):
    parser = Parser(prog=name)
    importlib.import_module(f"experiments.{name}").add_arguments(parser)
    assert all(action.help for action in parser._actions)


@pytest.mark.parametrize("text", ["0", "1.5", "x", "nan", ""])
def test_a_count_needs_a_whole_number(text, capsys):
    fails(capsys, ["--steps", text], "--steps", "whole number")


def test_numbers_have_bounds():
    assert number(float, above=0)("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        number(float, above=0)("0")


def test_unknown_names_list_those_there_are(capsys, tmp_path):
    fails(capsys, ["frontier"], "frontier", "digits", "accuracy")
    accuracy = ["accuracy", "--cases", tmp_path, "--structure", "TokenBlock"]
    fails(capsys, accuracy, "TokenBlock", "Diagonal")
    fails(capsys, ["classify", "--data", "letters"], "letters", "digits", "mnist5k")
    fails(capsys, ["scale", "--part", "weak"], "weak", "devices", "kills")
    fails(capsys, ["optimizers", "--method", "adamx"], "adamx", "kfac")


def test_a_folder_that_cannot_be_written(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    fails(capsys, ["--out", file / "below"], "--out", "may write")
    fails(capsys, ["accuracy", "--cases", tmp_path, "--json", file / "a.json"], "--json")
    fails(capsys, ["accuracy", "--cases", tmp_path, "--json", tmp_path], "--json", "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "mine"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_path_is_not_the_working_directory(name, capsys):
    parser = Parser(prog=name)
    importlib.import_module(f"experiments.{name}").add_arguments(parser)
    paths = [action for action in parser._actions if action.metavar in ("DIR", "FILE")]
    assert paths
    for action in paths:
        (option,) = action.option_strings
        fails(capsys, [name, option, ""], option, "needs the path")


TRAININGS = ["digits", "discrete", "seq2seq"]


@pytest.mark.parametrize("name", TRAININGS)
def test_bad_options_of_a_training(name, capsys, tmp_path):
    for option, value, *words in (
        ("--structure", "BatchSeparable", "BatchSeparable", "Diagonal", "Separable", "Full"),
        ("--steps", "0", "1 or more"),
        ("--batch-size", "0.5", "1 or more"),
        ("--kl-weight", "-1", "0 or more"),
    ):
        fails(capsys, [name, "--out", tmp_path / "run", option, value], option, *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["digits", "discrete"])
def test_only_a_run_that_is_there_is_resumed(name, capsys, tmp_path):
    fails(capsys, [name, "--resume", "--out", tmp_path / "new"], "--resume", "no checkpoint")
    assert not list(tmp_path.iterdir())


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


def test_the_command_line_sets_up_the_cache_before_jax_is_imported():
    code = "import sys, experiments.__main__; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def truncated(path):
    np.savez(path, **mlp_arrays())
    path.write_bytes(path.read_bytes()[:-400])


def damaged(path):
    np.savez(path, **mlp_arrays())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("X.npy")
    data = bytearray(path.read_bytes())
    data[info.header_offset + 200] ^= 0xFF
    path.write_bytes(bytes(data))


def one_array(path):
    with path.open("wb") as file:
        np.save(file, np.ones(3))


def pickled(path):
    np.savez(path, **{**mlp_arrays(), "X": np.array([object()])})


def changed(**changes):
    def write(path):
        arrays = {**mlp_arrays(), **changes}
        np.savez(path, **{name: value for name, value in arrays.items() if value is not None})

    return write


BAD_FILES = {
    "truncated": (truncated, "truncated"),
    "damaged": (damaged, "copy it anew"),
    "text": (lambda path: path.write_text("no archive"), "copy it anew"),
    "empty": (lambda path: path.write_bytes(b""), "copy it anew"),
    "one array": (one_array, "copy it anew"),
    "pickled": (pickled, "copy it anew"),
    "missing": (changed(b0=None), "b0 is missing"),
    "no kind": (changed(W0=None), "neither W0 nor L0_Wq"),
    "shape": (changed(b0=np.zeros(3, np.float32)), "b0 has the shape (3,)"),
    "rank": (changed(X=np.zeros(4, np.float32)), "X has the shape (4,)"),
    "type": (changed(b0=np.array(["a"] * 5)), "real numbers"),
    "infinite": (changed(b0=np.full(5, np.inf, np.float32)), "finite"),
    "negative": (changed(bs0=np.full(5, -1.0, np.float32)), "negative standard deviation"),
    "flat truth": (changed(mc_std=np.zeros((2, 3), np.float32)), "not positive"),
    "too few": (changed(X=np.zeros((1, 4), np.float32)), "mc_mean is of 2 inputs"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_case_file(name, capsys, tmp_path):
    write, said = BAD_FILES[name]
    cases = tmp_path / "cases"
    cases.mkdir()
    write(cases / "bad.npz")
    fails(capsys, ["accuracy", "--cases", cases, "--json", tmp_path / "a.json"], "bad.npz", said)
    assert [path.name for path in tmp_path.iterdir()] == ["cases"]


def test_heads_that_do_not_divide(capsys, tmp_path):
    np.savez(tmp_path / "block.npz", **block_arrays(heads=3))
    fails(capsys, ["accuracy", "--cases", tmp_path], "3 heads do not divide")


def test_a_folder_without_cases(capsys, tmp_path):
    fails(capsys, ["accuracy", "--cases", tmp_path / "none"], "no folder")
    fails(capsys, ["accuracy", "--cases", tmp_path], "no .npz")


@pytest.mark.parametrize("name", ["closure", "brownian"])
def test_what_needs_a_finished_run(name, capsys, tmp_path):
    fails(capsys, [name, "--run", tmp_path], "no finished run", "--out")
    (tmp_path / "metrics.json").write_text("{")
    fails(capsys, [name, "--run", tmp_path], "no finished run")
    settings = {"structure": "BatchSeparable", "steps": 1}
    (tmp_path / "metrics.json").write_text(json.dumps({"settings": settings}))
    fails(capsys, [name, "--run", tmp_path], "BatchSeparable", "no longer has", "Separable")
