"""`price`: its command line, a run over one cheap layer, and what becomes of a part that fails."""

import json

import jax.numpy as jnp
import pytest
from flax import nnx

from experiments import price
from experiments.__main__ import main
from experiments.price import PARTS, Shape

TINY = Shape(3, 8, 2, 2)


def command(*arguments):
    return main(["price", "--shape", ",".join(map(str, TINY)), "--repeats", "2", *arguments])


@pytest.mark.parametrize("shape", ["4,8,2", "4,8,x,1", "0,8,2,1", "4,8,3,1", ""])
def test_bad_shapes_are_one_line(shape, refused):
    refused(["price", "--shape", shape], "heads that divide D")


@pytest.mark.slow
def test_a_run_has_all_figures(capsys, tmp_path, monkeypatch):
    table = {"block": PARTS["dense"], price.NETWORK: PARTS["dense"]}
    monkeypatch.setattr(price, "PARTS", table)
    file = tmp_path / "a.json"
    assert command("--structure", "Diagonal", "--part", *table, "--json", str(file)) == 0
    records = json.loads(file.read_text())["records"]
    for record in records:
        assert record["status"] == "ok"
        assert all(record[f] > 0 for f in (*price.OVER_PLAIN.values(), "operations", "products"))
        assert record["faults"] >= 0
    # Plain, sampled or Diagonal, forward and gradient: gradients have three times as many.
    products = {part: [r["products"] for r in records if r["part"] == part] for part in table}
    assert sorted(products["block"]) == [1, 1, 3, 3, 9]
    assert sorted(products[price.NETWORK]) == [1, 3, 3, 8]  # of certain inputs
    assert "3 / 9" in capsys.readouterr().out


def test_what_fails_or_needs_too_much_memory_is_a_row(monkeypatch, capsys):
    class Sorted(nnx.Linear):
        """Moments have no rule for sorting."""

        def __call__(self, x):
            return jnp.sort(super().__call__(x))

    monkeypatch.setattr(price, "PARTS", {"block": lambda _, rngs: Sorted(8, 8, rngs=rngs)})
    assert command("--structure", "Separable") == 1
    said = capsys.readouterr().out
    assert "Separable block gradient failed: PropagationError" in said
    monkeypatch.setattr(price, "CPU_GIB", 1e-9)
    assert command("--structure", "Diagonal") == 0
    assert "GiB of memory are over the limit" in capsys.readouterr().out
