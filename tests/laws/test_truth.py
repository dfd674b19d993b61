"""A whole block against sampled networks of Flax modules; of `Full`, see test_sampled_truth.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import filled

pytestmark = pytest.mark.slow

TOKENS, FEATURES, HEADS, SAMPLES = 16, 16, 2, 4000


@pytest.fixture(scope="module")
def block():
    return mj.nn.EncoderBlock(
        FEATURES, HEADS, norm_first=True, activation="gelu", hidden_features=32, rngs=nnx.Rngs(0)
    )


@pytest.fixture(scope="module")
def x():
    keys = jax.random.split(jax.random.key(1))
    common = jax.random.normal(keys[0], (1, FEATURES), jnp.float32)
    return 0.8 * common + 0.6 * jax.random.normal(keys[1], (TOKENS, FEATURES), jnp.float32)


@pytest.fixture(scope="module")
def beliefs(block):
    return mj.Bayesian(block).beliefs


@pytest.fixture(scope="module")
def truth(block, beliefs, x):
    with jax.numpy_rank_promotion("allow"):  # Flax's layers promote
        return mj.monte_carlo(
            lambda arrays: filled(nnx.clone(block), arrays)(x), beliefs, jax.random.key(2), SAMPLES
        )


def test_a_random_block(block, x, truth):
    """Tokens share the noise of the weights, so `Diagonal` has no band."""
    model = mj.Bayesian(block)
    with jax.numpy_rank_promotion("allow"):
        mean, sd = jax.jit(lambda x: (lambda out: (out.mean[0], out.sd[0]))(model(x[None])))(x)
    assert 0.97 < (sd / truth.standard_deviation).mean() < 1.03
    # The sampled mean's own error is 1 / sqrt(SAMPLES) = 0.016 sd.
    shift = (mean - truth.mean) / truth.standard_deviation
    assert jnp.mean(shift**2) ** 0.5 < 0.016 + 0.015
