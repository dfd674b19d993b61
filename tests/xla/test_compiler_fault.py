"""A fault of XLA for CPU that the library works around: sums over a product with one number broadcast.

In jaxlib 0.10.2 to 0.12.0 the result is silently wrong if product and reduction are fused (by XLA's YNN
library) and have at least 4,096 numbers. `plain` in `unflagged_program` has the smallest examples:

    jax.jit(lambda x: jnp.sum(x @ jnp.full((64, 64), 0.01), axis=0))(x)

Only the right operand matters. The reduction may be over any axis, after elementwise functions or
another product, in `vmap` and derivatives, in float32, bfloat16 and float64. Not affected: left operands
of one number, right operands that vary along one axis, products with vectors, and x.T @ y.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from moment_jax.posterior import FullNormal, MatrixNormal, OutputShared, Point
from tests.xla import unflagged_program
from tests.xla.one_number import faulty_products
from tests.xla.unflagged_program import STRUCTURES


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:3]))


# The first jaxlib that compiles `plain` wrongly, and the first later one that does not (999: unknown).
BROKEN, MENDED = "0.10.2", "999"
HAS_THE_FAULT = _numbers(BROKEN) <= _numbers(version("jaxlib")) < _numbers(MENDED)


def errors(*groups: str) -> dict[str, dict[str, float]]:
    """Of a fresh process without any flag."""
    environment = {
        k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("JAX_")
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.xla.unflagged_program", *groups],
        env={**environment, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_fault_is_there():
    """Once no supported jaxlib has the fault, its workaround can go."""
    plain = errors("plain")["plain"].values()
    if not HAS_THE_FAULT:
        assert max(plain) < 1e-5
    else:
        assert min(plain) > 1e-3, (
            f"jaxlib {version('jaxlib')} compiles a sum over a product with one number broadcast "
            "correctly: name it in MENDED. Once it is the oldest supported release, "
            "`moment_jax.xla.materialized_inputs` and this file can go."
        )


@pytest.mark.skipif(not HAS_THE_FAULT, reason="this jaxlib compiles such products correctly")
def test_everything_is_right_without_a_flag():
    """Parameters closed over or made inside `jit` against the same as arguments."""
    wrong = {
        (group, name): error
        for group, results in errors().items()
        if group != "plain"
        for name, error in results.items()
        if not error < 1e-5
    }
    assert not wrong


def test_the_search_finds_the_fault():
    x = jnp.ones((4, 4))
    assert faulty_products(lambda x: jnp.sum(x @ jnp.full((4, 4), 0.5) ** 2), x)
    assert not faulty_products(lambda x: jnp.sum(jnp.full((4, 4), 0.5) @ x), x)


SMALL = jnp.ones((5, 6))
WITHIN_A_DECODER = {"encoder_block", "cross_attention", "feed_forward"}
TRANSFORMS = sorted(set(unflagged_program.transforms(STRUCTURES["Diagonal"])) - WITHIN_A_DECODER)


def gradient(structure, name, family=None):
    """The gradient of a transform, with parameters made inside `jit`; it includes the forward pass."""
    of = STRUCTURES[structure]
    transform = unflagged_program.transforms(of)[name]

    def total(x):
        made = unflagged_program.parameters(of, x.shape, family)
        return sum(map(jnp.sum, unflagged_program.sums(transform(x, made))))

    return jax.grad(total)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_right_operand_is_one_number(structure, name):
    assert faulty_products(gradient(structure, name), SMALL) == []


FAMILIES = {
    "Point": lambda shape, m: Point(jnp.full(shape, m)),
    "OutputShared": lambda shape, m: OutputShared(jnp.full(shape, m), jnp.full(shape[1:], 0.01)),
    "MatrixNormal": lambda shape, m: MatrixNormal(
        jnp.full(shape, m), *(jnp.full((n, n), 0.1) for n in shape)
    ),
    "FullNormal": lambda shape, m: FullNormal(jnp.full(shape, m), jnp.full((*shape, *shape), 0.01)),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_nor_with_any_family(structure, family):
    for name in ("dense", "embedding"):
        assert faulty_products(gradient(structure, name, FAMILIES[family]), SMALL) == []
