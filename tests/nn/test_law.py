"""The first law: without noise a pass is the network, and `check` says where it is not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.propagation import dense, elementwise, normalization

X = jax.random.normal(jax.random.key(0), (3, 4, 6), jnp.float32)


class Block(nnx.Module):
    """A norm, two layers with a function between them, and a residual sum."""

    def __init__(self, dtype):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(6, 8, rngs=rngs, dtype=dtype)
        self.norm = nnx.LayerNorm(8, rngs=rngs, dtype=dtype)
        self.up, self.down = (nnx.Linear(8, 8, rngs=rngs, dtype=dtype) for _ in range(2))

    def __call__(self, x):
        x = self.embed(x)
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


def off(rule):
    """The rule with a factor of 1.01 on its mean."""

    def broken(*args, **options):
        mean, *rest = rule(*args, **options)
        return 1.01 * mean, *rest

    return broken


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_pass_that_is_the_network_passes(dtype):
    model = mj.Bayesian(Block(dtype), structure=mj.Diagonal)
    with jax.numpy_rank_promotion("allow"):
        assert model.check(X, samples=2).sd_ratio > 0


@pytest.mark.parametrize(
    ("module", "rule", "line"),
    [
        (dense, "dense", "self.embed(x)"),
        (normalization, "norm_with_carry", "self.norm(x)"),
        (elementwise, "recognised", "jnp.tanh"),
    ],
)
def test_a_wrong_rule_is_named_by_its_first_operation(module, rule, line, monkeypatch):
    found = getattr(module, rule)

    def bent(*args):
        name, transform, assumes = found(*args)
        return (
            name,
            lambda m, v: transform(m, v)._replace(mean=1.01 * transform(m, v).mean),
            assumes,
        )

    monkeypatch.setattr(module, rule, bent if rule == "recognised" else off(found))
    jax.clear_caches()
    model = mj.Bayesian(Block(jnp.float32), structure=mj.Diagonal)
    with (
        jax.numpy_rank_promotion("allow"),
        pytest.raises(mj.PropagationError, match="without noise is the network") as error,
    ):
        model.check(X, samples=2)
    number = int(str(error.value).split("test_law.py:")[1].split()[0])
    with open(__file__) as file:
        assert line in file.read().splitlines()[number - 1]
