"""Decoding token by token from cached keys and values is the whole pass with a causal mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.layers.attention.squared_products import by_features
from tests.builders import assert_close

FEATURES, HEADS, TOKENS = 4, 2, 5
X, MEMORY = (
    jax.random.normal(key, (2, n, FEATURES), jnp.float32)
    for key, n in zip(jax.random.split(jax.random.key(0)), (TOKENS, 3), strict=True)
)
SETTINGS = {"hidden_features": 6, "relative_scale": 0.3, "rngs": nnx.Rngs(0)}
CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
CACHED = [mj.Diagonal, mj.TokenBlock]
variances = jax.vmap(lambda cov: cov.variance())


def token_by_token(model, cache, x):
    """A prompt of two tokens in one step, then one token a step."""
    step = nnx.jit(lambda m, x, c: m.step(x, None, c))
    means, spreads = [], []
    for places in (slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)):
        mean, cov, cache = step(model, x[:, places], cache)
        means.append(mean)
        spreads.append(variances(cov))
    return jnp.concatenate(means, axis=1), jnp.concatenate(spreads, axis=1)


@pytest.mark.parametrize(("structure", "norm_first"), list(zip(CACHED, (True, False), strict=True)))
def test_a_causal_encoder(structure, norm_first):
    model = mj.nn.Encoder(
        2, FEATURES, HEADS, structure=structure, norm_first=norm_first, **SETTINGS
    )
    mean, cov = nnx.jit(lambda m, x: m(x, mask=CAUSAL))(model, X)
    # Room for more tokens than come: what is empty has no influence.
    stepped, spread = token_by_token(model, model.start(TOKENS + 2, batch=(2,)), X)
    assert_close(stepped, mean, 1e-5)
    assert_close(spread, variances(cov), 1e-5)


def test_a_decoder_with_a_padded_memory():
    model = mj.nn.Decoder(1, FEATURES, HEADS, structure=mj.Diagonal, norm_first=True, **SETTINGS)
    valid = jnp.array([[True, True, True], [True, True, False]])
    mean, cov = nnx.jit(lambda m, x: m(x, MEMORY, mask=CAUSAL, memory_valid=valid))(model, X)
    stepped, spread = token_by_token(model, model.start(TOKENS, MEMORY, memory_valid=valid), X)
    assert_close(stepped, mean, 1e-5)
    assert_close(spread, variances(cov), 1e-5)


def test_few_queries_cost_no_square_of_the_keys():
    """A step's program has nothing of size S^2, and its cost grows with S as S does."""

    def flops(length):
        model = mj.nn.Encoder(1, FEATURES, HEADS, structure=mj.Diagonal, **SETTINGS)
        graph, state = nnx.split(model)
        step = jax.jit(lambda state, x, cache: nnx.merge(graph, state).step(x, None, cache))
        compiled = step.lower(state, X[0, :1], model.start(length)).compile()
        assert f"{length},{length}]" not in compiled.as_text()
        return compiled.cost_analysis()["flops"]

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


def encoder(structure):
    return mj.nn.Encoder(1, FEATURES, HEADS, structure=structure, **SETTINGS)
