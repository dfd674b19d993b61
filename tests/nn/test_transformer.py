"""The encoder-decoder Transformer against sampled networks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj

pytestmark = pytest.mark.slow

FEATURES, HEADS, TOKENS, SAMPLES = 16, 2, 8, 3000
CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
KEYS = jax.random.split(jax.random.key(5), 4)
SOURCE, TARGET = (
    jax.random.normal(key, (2, count, FEATURES), jnp.float32)[0]
    for key, count in zip(KEYS[:2], (10, TOKENS), strict=True)
)


def test_two_and_two_random_blocks_against_samples():
    """Sampled networks are Flax's own layers; the target attends to the source in all blocks."""
    model = mj.nn.Transformer(
        FEATURES, HEADS, 2, norm_first=True, activation="gelu", hidden_features=32,
        relative_scale=0.15, rngs=nnx.Rngs(0),
    )  # fmt: skip
    with jax.numpy_rank_promotion("allow"):
        truth = mj.monte_carlo(
            lambda params: model.network(params)(SOURCE, TARGET, mask=CAUSAL),
            model.params,
            KEYS[2],
            SAMPLES,
        )
    mean, cov = nnx.jit(lambda m: m(SOURCE, TARGET, mask=CAUSAL))(model)
    agreement = mj.reference.Agreement.of(
        mean, jnp.sqrt(cov.variance()), truth.mean, truth.standard_deviation
    )
    assert 0.95 < agreement.sd_ratio < 1.05, agreement
    assert agreement.mean_error < 0.05, agreement
