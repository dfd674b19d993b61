"""`price`: its command line, a run over one cheap layer, and that it compares what is alike."""

import json
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from experiments import draws, price
from experiments.__main__ import main
from experiments.price.parts import PARTS, Part, Shape, arguments_of, forward_of
from experiments.programs import failure, interleaved, size_of

TINY = Shape(3, 8, 2, 2)


pytestmark = pytest.mark.usefixtures("settings_of_a_user")


@pytest.fixture
def cheap(monkeypatch):
    """A dense layer in the place of the block, and no other part."""
    monkeypatch.setattr(price, "PARTS", {"block": PARTS["dense"]})


def command(*arguments):
    return main(["price", "--shape", ",".join(map(str, TINY)), "--repeats", "2", *arguments])


def records_of(file):
    written = json.loads(file.read_text())
    return written, {(r["structure"], r["kind"]): r for r in written["records"]}


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["--shape", shape]
            for shape in ("4,8,2", "4,8,2,1,1", "4,8,x,1", "0,8,2,1", "4,8,3,1", "")
        ),
        ["--structure", "Foo"],
        ["--repeats", "0"],
        ["--memory-limit", "0"],
    ],
)
def test_bad_options_are_one_line(arguments, capsys):
    assert main(["price", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert arguments[0] in line
    assert "heads that divide D" in line or arguments[0] != "--shape"


def test_a_file_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert command("--json", str(tmp_path / "file" / "a.json")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--json" in line


def test_a_run_has_all_figures(cheap, capsys, tmp_path):
    assert command("--structure", "Diagonal", "--json", str(tmp_path / "a.json")) == 0
    written, records = records_of(tmp_path / "a.json")
    assert written["jax"] == jax.__version__
    assert written["device"] == jax.devices()[0].device_kind
    assert len(records) == 5
    for record in records.values():
        assert record["status"] == "ok"
        assert record["shape"] == TINY._asdict()
        figures = [*price.OVER_PLAIN.values(), *price.COUNTS.values()]
        assert all(record[figure] > 0 for figure in figures)
    products = [records[name, kind]["products"] for name, kind in records]
    assert products == [1, 3, 1, 3, 9]  # plain, Diagonal, sampled; gradients three times as many
    plain, diagonal = capsys.readouterr().out.splitlines()[-2:]
    assert "MiB" in plain
    assert "3 / 9" in diagonal


@pytest.mark.parametrize(("limit", "compiled"), [("1e-9", False), ("6e-7", True)])
def test_what_needs_too_much_memory_is_not_run(limit, compiled, cheap, capsys, tmp_path):
    """Nor compiled, where its arguments alone do."""
    options = ["--memory-limit", limit, "--json", str(tmp_path / "a.json")]
    assert command("--structure", "Diagonal", *options) == 0
    _, records = records_of(tmp_path / "a.json")
    assert {record["status"] for record in records.values()} == {"skipped"}
    assert not any("seconds" in record for record in records.values())
    assert ("bytes" in records["plain", "forward"]) == compiled
    assert "GiB of memory are over the limit" in capsys.readouterr().out


def test_what_fails_is_a_row_and_a_status(monkeypatch, capsys):
    def fails(*_):
        raise MemoryError("too large")

    part = Part(PARTS["dense"].params, fails, PARTS["dense"].plain)
    monkeypatch.setattr(price, "PARTS", {"block": part})
    assert command("--structure", "Separable") == 1
    said = capsys.readouterr()
    assert "Separable block gradient failed: MemoryError: too large" in said.out
    assert "below their tables" in said.err


@pytest.mark.parametrize("name", PARTS)
def test_certain_weights_give_the_plain_part(name):
    """So both sides are of one function: activation, epsilon, heads."""
    part = PARTS[name]
    params, x, _, statistics = arguments_of("Diagonal", part, TINY)
    certain = jax.tree.map(mj.posterior.Point, draws.means(params))
    cov = jax.vmap(lambda x: mj.Diagonal.zeros(x.shape))(x)
    mean, _ = jax.jit(forward_of("Diagonal", part, TINY.heads))(certain, x, cov, statistics)
    plain = forward_of("plain", part, TINY.heads)(draws.means(params), x)
    np.testing.assert_allclose(mean, plain, atol=1e-5)


@pytest.mark.parametrize("name", ["Separable", "FrozenSeparable"])
def test_only_frozen_features_have_statistics(name):
    statistics = arguments_of(name, PARTS["dense"], TINY)[3]
    assert bool(jax.tree.leaves(statistics)) == (name == "FrozenSeparable")


def test_functions_count_where_they_are_called_and_loops_once():
    square = jax.jit(lambda x: x @ x)

    def program(x):
        return jax.lax.fori_loop(0, 5, lambda _, x: square(x), square(square(x)))[:2] @ x

    size = size_of(jax.jit(program).lower(jnp.ones((4, 4))))
    assert (size.products, size.product_shapes) == (4, 2)
    plain = size_of(jax.jit(lambda x: (x @ x) @ x + 1).lower(jnp.ones((2, 2))))
    assert plain == (5, 2, 1)


def test_slow_functions_do_not_cost_fast_ones_their_runs():
    calls = {"slow": 0, "fast": 0}

    def called(name, seconds):
        calls[name] += 1
        time.sleep(seconds)

    functions = {name: partial(called, name, 0.05 * (name == "slow")) for name in calls}
    times = interleaved(functions, 9, limit=0.04)
    assert calls == {"slow": 1 + 3, "fast": 1 + 9}
    assert times["fast"] < 0.05 <= times["slow"]


def test_a_lack_of_memory_is_no_failure():
    assert failure(RuntimeError("RESOURCE_EXHAUSTED: 3 GiB"))["status"] == "skipped"
    assert failure(ValueError("of two\nlines")) == {
        "status": "failed",
        "reason": "ValueError: of two lines",
    }
