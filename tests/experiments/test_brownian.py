"""Chains and token motion: what the Brownian experiment's figures are, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from experiments.brownian import antisymmetric_share, split_scores
from experiments.brownian.motion import independence_test, motion_report
from experiments.brownian.stream import residual_stream
from tests.builders import assert_close


@pytest.fixture(autouse=True)
def settings_of_a_user():
    """Free broadcasting, but not float32: identities hold to the last digit in float64."""
    with jax.numpy_rank_promotion("allow"):
        yield


KEY = jax.random.key(0)


def test_scores_split_into_orthogonal_parts():
    scores = jax.random.normal(jax.random.key(4), (6, 6))
    parts = split_scores(scores)
    total = parts.symmetric + parts.gradient + parts.cyclic
    assert_close(total, scores - scores.mean(axis=1, keepdims=True))
    assert_close(parts.shares.sum(), jnp.ones(()))
    for a, b in [("symmetric", "cyclic"), ("symmetric", "gradient"), ("gradient", "cyclic")]:
        assert abs(jnp.sum(getattr(parts, a) * getattr(parts, b))) < 1e-10
    # Without the cyclic part, and only then, the chain is reversible.
    for kept, reversible in [(parts.symmetric + parts.gradient, True), (total, False)]:
        chain = jax.nn.softmax(kept, axis=1)
        gap = mj.brownian.detailed_balance_gap(chain, mj.brownian.stationary(chain))
        assert (gap < 1e-12) == reversible
    query, key = jax.random.normal(jax.random.key(6), (2, 5, 3))
    form = query @ key.T
    share = jnp.linalg.norm((form - form.T) / 2) ** 2 / jnp.linalg.norm(form) ** 2
    assert_close(antisymmetric_share(query, key), share)


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
    # Dependence without correlation is seen, independence is not refuted.
    assert independence_test(x, x**2, KEY).p_value < 0.05
    assert found.p_value > 0.01


def brownian_stream():
    """3 blocks, 60 inputs, 2 tokens, 4 features."""
    steps = jax.random.normal(KEY, (3, 60, 2, 4))
    start = jax.random.normal(jax.random.key(100), (1, 60, 2, 4))
    return jnp.concatenate([start, start + jnp.cumsum(steps, axis=0)])


def from_steps(x, change):
    """A stream from the same start, with changed steps."""
    return x[:1] + jnp.cumsum(change(jnp.diff(x, axis=0, prepend=x[:1])), axis=0)


DEPTH = jnp.arange(4.0).reshape(-1, 1, 1, 1)
FAULTS = {
    "drift": lambda x: x + 2 * DEPTH,
    "where the token is": lambda x: x * 0.3**DEPTH,
    "the step before": lambda x: jnp.concatenate([x[:1], x[:1] + jnp.cumsum(x[1:], axis=0)]),
    "not normal": lambda x: from_steps(x, lambda steps: steps**3),
    "-fold between blocks": lambda x: from_steps(x, lambda steps: steps * DEPTH),
    "not as depth": lambda x: x[:1] + 2 * DEPTH * (x[1:2] - x[:1]),
}


@pytest.mark.slow
def test_a_brownian_stream_is_not_refuted_and_each_fault_is_named():
    motion = motion_report(brownian_stream(), key=KEY, permutations=1499)
    assert motion.is_brownian, motion.failures
    growth = motion.growth
    assert abs(growth.exponent - 1) < 3 * growth.exponent_error
    np.testing.assert_allclose(growth.brownian_variance, np.arange(4), rtol=0.2)
    assert abs(motion.blocks[1].drift_share) < 0.05
    assert motion.blocks[1].step_length == pytest.approx(1, abs=0.1)
    for fault, change in FAULTS.items():
        motion = motion_report(change(brownian_stream()), key=KEY, permutations=1499)
        assert not motion.is_brownian
        assert fault in motion.sentence


class Foreign(nnx.Module):
    """A network of another library that exposes its blocks, and calls these."""

    def __init__(self, called):
        self.blocks = nnx.List(nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))
        self.called = called

    def __call__(self, x):
        for block in self.blocks[: self.called]:
            x = block(x - 1)
        return jnp.sum(x)


def test_the_stream_of_any_module_with_blocks():
    module = Foreign(2)
    x = jax.random.normal(KEY, (5, 3, 4), jnp.float32)
    stream = residual_stream(module, x)
    assert_close(stream[0], x - 1, 1e-6)
    assert_close(stream[2], module.blocks[1](stream[1] - 1), 1e-6)
    assert_close(module(x), jnp.sum(stream[2]), 1e-5)  # the module is as it was


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: residual_stream(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), KEY), TypeError, "blocks"),
        (lambda: residual_stream(Foreign(0), jnp.ones((2, 3, 4))), ValueError, "no block"),
        (lambda: motion_report(jnp.ones((2, 5, 3, 4)), key=KEY), ValueError, "N >= 20"),
        (lambda: motion_report(jnp.ones((2, 20, 3, 4)), key=KEY, permutations=9), ValueError,
         "permutations >= 400"),
    ],
)  # fmt: skip
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()
