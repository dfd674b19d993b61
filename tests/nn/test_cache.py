"""Decoding token by token from cached keys and values equals a whole pass with a causal mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.layers.attention.squared_products import by_features
from tests.builders import assert_close

FEATURES, HEADS, TOKENS = 4, 2, 4
X, MEMORY = (
    jax.random.normal(key, (2, n, FEATURES), jnp.float32)
    for key, n in zip(jax.random.split(jax.random.key(0)), (TOKENS, 3), strict=True)
)
SETTINGS = {"hidden_features": 6, "relative_scale": 0.3, "rngs": nnx.Rngs(0)}
CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
variances = jax.vmap(lambda cov: cov.variance())


def encoder(structure, blocks=1, **options):
    return mj.nn.Encoder(blocks, FEATURES, HEADS, structure=structure, **SETTINGS, **options)


def in_steps(model, cache, *counts):
    """Moments computed in steps of `counts` tokens."""
    step = nnx.jit(lambda m, x, c: m.step(x, None, c))
    means, spreads, first = [], [], 0
    for count in counts:
        mean, cov, cache = step(model, X[:, first : first + count], cache)
        means.append(mean)
        spreads.append(variances(cov))
        first += count
    return jnp.concatenate(means, axis=1), jnp.concatenate(spreads, axis=1)


@pytest.mark.parametrize(
    ("structure", "norm_first", "counts"),
    [(mj.Diagonal, True, (2, 1, 1)), (mj.TokenBlock, False, (2, 2))],
)
def test_a_causal_encoder(structure, norm_first, counts):
    """A prompt of two tokens in one step, then the others."""
    model = encoder(structure, 2, norm_first=norm_first)
    mean, cov = nnx.jit(lambda m, x: m(x, mask=CAUSAL))(model, X)
    # The cache has room for more tokens; empty places have no influence.
    stepped, spread = in_steps(model, model.start(TOKENS + 2, batch=(2,)), *counts)
    assert_close(stepped, mean, 1e-5)
    assert_close(spread, variances(cov), 1e-5)


def test_a_decoder_with_a_padded_memory():
    model = mj.nn.Decoder(1, FEATURES, HEADS, structure=mj.Diagonal, norm_first=True, **SETTINGS)
    valid = jnp.array([[True, True, True], [True, True, False]])
    mean, cov = nnx.jit(lambda m, x: m(x, MEMORY, mask=CAUSAL, memory_valid=valid))(model, X)
    stepped, spread = in_steps(model, model.start(TOKENS, MEMORY, memory_valid=valid), 1, 1, 1, 1)
    assert_close(stepped, mean, 1e-5)
    assert_close(spread, variances(cov), 1e-5)


def test_few_queries_cost_no_square_of_the_keys():
    """A step's program has nothing of size S^2, and its cost grows with S as S does."""

    def flops(length):
        model = encoder(mj.Diagonal)
        graph, state = nnx.split(model)
        step = jax.jit(lambda state, x, cache: nnx.merge(graph, state).step(x, None, cache))
        lowered = step.lower(state, X[0, :1], model.start(length))
        assert f"{length}x{length}x" not in lowered.as_text()
        return lowered.cost_analysis()["flops"]

    assert by_features(1, 640, FEATURES // HEADS)
    short, long = flops(640), flops(2560)
    assert long < 4.2 * short


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: encoder(mj.Diagonal).start(0), ValueError, "at least one token"),
        (lambda: encoder(mj.Separable).start(3), TypeError, "tokens are independent"),
        (lambda: encoder(mj.Full).start(3), TypeError, "whole pass"),
    ],
)
def test_messages(call, error, words):
    with pytest.raises(error, match=words):
        call()
