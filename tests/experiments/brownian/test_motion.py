"""Token motion: true Brownian streams pass, each way of not being one is named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.builders import assert_close

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")

from experiments.brownian.motion import independence_test, motion_report, variance_growth
from experiments.brownian.stream import residual_stream

KEY = jax.random.key(0)
SHAPE = (3, 60, 2, 4)  # blocks, inputs, tokens, features


def brownian_stream(seed=0):
    steps = jax.random.normal(jax.random.key(seed), SHAPE)
    start = jax.random.normal(jax.random.key(100 + seed), (1, *SHAPE[1:]))
    return jnp.concatenate([start, start + jnp.cumsum(steps, axis=0)])


def report(stream):
    return motion_report(stream, key=KEY, permutations=1499)


def test_distance_correlation_by_its_definition():
    x, y = jax.random.normal(KEY, (2, 12, 1, 3))

    def centred(points):
        d = np.linalg.norm(points[:, None] - points[None], axis=-1)
        n = len(d)
        u = d - d.sum(0) / (n - 2) - d.sum(1)[:, None] / (n - 2) + d.sum() / (n - 1) / (n - 2)
        return u * (1 - np.eye(n))

    a, b = centred(np.asarray(x[:, 0])), centred(np.asarray(y[:, 0]))
    found = independence_test(x, y, KEY, permutations=99)
    assert_close(found.correlation, (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))
    rotated = 2 * x @ jnp.linalg.qr(jax.random.normal(KEY, (3, 3)))[0]
    assert_close(independence_test(x, rotated, KEY).correlation, jnp.ones(()))
    # Dependence without correlation is seen, independence is not refuted.
    assert independence_test(x, x**2, KEY).p_value < 0.05
    assert found.p_value > 0.01


def test_a_brownian_stream_is_not_refuted():
    motion = report(brownian_stream())
    assert motion.is_brownian, motion.failures
    assert "Nothing" in motion.sentence
    growth = motion.growth
    assert abs(growth.exponent - 1) < 3 * growth.exponent_error
    np.testing.assert_allclose(growth.brownian_variance, np.arange(4), rtol=0.2)
    block = motion.blocks[1]
    assert abs(block.drift_share) < 0.05
    assert block.step_length == pytest.approx(1, abs=0.1)


FAULTS = {
    "drift": lambda x: x + 2 * jnp.arange(4.0).reshape(-1, 1, 1, 1),
    "where the token is": lambda x: x * 0.3 ** jnp.arange(4.0).reshape(-1, 1, 1, 1),
    "the step before": lambda x: jnp.concatenate([x[:1], x[:1] + jnp.cumsum(x[1:], axis=0)]),
    "not normal": lambda x: x[:1] + jnp.cumsum(jnp.diff(x, axis=0, prepend=x[:1]) ** 3, axis=0),
    "-fold between blocks": lambda x: x[:1]
    + jnp.cumsum(jnp.diff(x, axis=0, prepend=x[:1]) * jnp.arange(4.0).reshape(-1, 1, 1, 1), axis=0),
    "not as depth": lambda x: x[:1] + 2 * (jnp.arange(4.0).reshape(-1, 1, 1, 1) * (x[1:2] - x[:1])),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault):
    motion = report(FAULTS[fault](brownian_stream()))
    assert not motion.is_brownian
    assert fault in motion.sentence


class Block(nnx.Module):
    """A foreign block."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x, scale):
        return x + scale * self.dense(x)


class Foreign(nnx.Module):
    """A foreign network that exposes its blocks."""

    def __init__(self):
        self.blocks = nnx.List(Block(nnx.Rngs(i)) for i in range(2))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x - 1, scale=0.5)
        return jnp.sum(x)


def test_the_stream_of_any_module_with_blocks():
    module = Foreign()
    x = jax.random.normal(KEY, (5, 3, 4), jnp.float32)
    with jax.numpy_rank_promotion("allow"):
        stream = residual_stream(module, x)
        assert_close(stream[0], x - 1, 1e-6)
        assert_close(stream[2], module.blocks[1](stream[1] - 1, 0.5), 1e-6)
        assert_close(module(x), jnp.sum(stream[2]), 1e-5)  # the module is as it was
    assert isinstance(module.blocks[0], Block)


class Idle(Foreign):
    """It has blocks but calls none."""

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: residual_stream(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), KEY), TypeError, "blocks"),
        (lambda: residual_stream(Idle(), jnp.ones((2, 3, 4))), ValueError, "no block"),
        (lambda: motion_report(jnp.ones((2, 5, 3, 4)), key=KEY), ValueError, "N >= 20"),
        (lambda: motion_report(jnp.ones((2, 20, 3, 4)), key=KEY, permutations=9), ValueError,
         "permutations >= 400"),
        (lambda: variance_growth(jnp.ones((1, 2, 3, 4))), ValueError, "L >= 1"),
        (lambda: independence_test(jnp.ones((3, 1, 1)), jnp.ones((3, 1, 1)), KEY), ValueError,
         "N >= 4"),
    ],
)  # fmt: skip
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()
