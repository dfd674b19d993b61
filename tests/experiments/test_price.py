"""`price`: its command line, a run over one cheap layer, and that it compares what is alike."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from experiments import draws, price
from experiments.__main__ import main
from experiments.price.parts import PARTS, Part, Shape, arguments_of, forward_of
from experiments.programs import size_of

TINY = Shape(3, 8, 2, 2)

pytestmark = pytest.mark.usefixtures("settings_of_a_user")


def command(*arguments):
    return main(["price", "--shape", ",".join(map(str, TINY)), "--repeats", "2", *arguments])


@pytest.mark.parametrize("shape", ["4,8,2", "4,8,2,1,1", "4,8,x,1", "0,8,2,1", "4,8,3,1", ""])
def test_bad_shapes_are_one_line(shape, capsys):
    assert main(["price", "--shape", shape]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "heads that divide D" in line


@pytest.mark.slow
def test_a_run_has_all_figures(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(price, "PARTS", {"block": PARTS["dense"]})
    file = tmp_path / "a.json"
    assert command("--structure", "Diagonal", "--json", str(file)) == 0
    records = json.loads(file.read_text())["records"]
    for record in records:
        assert record["status"] == "ok"
        figures = [*price.OVER_PLAIN.values(), *price.COUNTS.values()]
        assert all(record[figure] > 0 for figure in figures)
    # Plain, sampled or Diagonal, forward and gradient: gradients have three times as many.
    assert sorted(record["products"] for record in records) == [1, 1, 3, 3, 9]
    plain, diagonal = capsys.readouterr().out.splitlines()[-2:]
    assert "MiB" in plain
    assert "3 / 9" in diagonal


def test_what_fails_or_needs_too_much_memory_is_a_row(monkeypatch, capsys):
    def fails(*_):
        raise MemoryError("too large")

    part = Part(PARTS["dense"].params, fails, PARTS["dense"].plain)
    monkeypatch.setattr(price, "PARTS", {"block": part})
    assert command("--structure", "Separable") == 1
    said = capsys.readouterr()
    assert "Separable block gradient failed: MemoryError: too large" in said.out
    assert "below their tables" in said.err
    monkeypatch.setattr(price, "CPU_GIB", 1e-9)
    assert command("--structure", "Diagonal") == 0
    assert "GiB of memory are over the limit" in capsys.readouterr().out


@pytest.mark.parametrize("name", PARTS)
def test_certain_weights_give_the_plain_part(name):
    """So both sides are of one function: activation, epsilon, heads."""
    part = PARTS[name]
    params, x, _ = arguments_of("Diagonal", part, TINY)
    certain = jax.tree.map(mj.posterior.Point, draws.means(params))
    cov = jax.vmap(lambda x: mj.Diagonal.zeros(x.shape))(x)
    mean, _ = jax.jit(forward_of("Diagonal", part, TINY.heads))(certain, x, cov)
    plain = forward_of("plain", part, TINY.heads)(draws.means(params), x)
    np.testing.assert_allclose(mean, plain, atol=1e-5)


def test_functions_count_where_they_are_called_and_loops_once():
    square = jax.jit(lambda x: x @ x)

    def program(x):
        return jax.lax.fori_loop(0, 5, lambda _, x: square(x), square(square(x)))[:2] @ x

    assert size_of(jax.jit(program).lower(jnp.ones((4, 4)))).products == 4
