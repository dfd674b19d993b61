"""Cross-attention and the decoder block against Flax's layers and sampled truth."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from moment_jax.covariance import Covariance
from tests.builders import (
    ALL_STRUCTURES,
    assert_close,
    decoder_of,
    plain_attention,
    plain_block,
    plain_linear,
    plain_norm,
    random_block,
    random_dense,
)

KEYS = jax.random.split(jax.random.key(12), 6)
TOKENS, SOURCES, FEATURES, HEADS = 3, 4, 4, 2
MEAN = jax.random.normal(KEYS[0], (TOKENS, FEATURES))
MEMORY = jax.random.normal(KEYS[1], (SOURCES, FEATURES))
CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))


def decoder_params(key, scale=0.3):
    return decoder_of(*(random_block(k, FEATURES, 6, scale) for k in jax.random.split(key)))


PARAMS = decoder_params(KEYS[2])


def of_layers(arrays, x, memory, *, norm_first, mask=None):
    """A decoder block of Flax's layers."""
    norms = [plain_norm(p) for p in (arrays.norm1, arrays.norm2, arrays.norm3)]
    attend = plain_attention(arrays.self_attention, HEADS)
    look = plain_attention(arrays.cross_attention, HEADS)
    hidden, output = map(plain_linear, (arrays.feed_forward.hidden, arrays.feed_forward.output))
    branches = (
        lambda y: attend(y, mask=mask),
        lambda y: look(y, memory, memory),
        lambda y: output(jax.nn.relu(hidden(y))),
    )
    for norm, branch in zip(norms, branches, strict=True):
        x = x + branch(norm(x)) if norm_first else norm(x + branch(x))
    return x


@functools.cache
def decoder(structure: type[Covariance], norm_first: bool = True):
    """Mean and variance by noise of the inputs, parameters, and the memory with its mask."""

    @jax.jit
    def run(mean, noise, params, memory, memory_mask):
        cov, memory_cov = (structure.independent(jnp.full(a.shape, noise)) for a in (mean, memory))
        if structure is mj.Separable:  # its feature correlation is averaged over the prompt
            cov = cov.pooled(jnp.arange(TOKENS) < 2)
        options = {"num_heads": HEADS, "mask": CAUSAL, "memory_mask": memory_mask}
        mean, cov = mj.decoder_block(
            mean, cov, memory, memory_cov, params, norm_first=norm_first, **options
        )
        return mean, cov.variance()

    return run


SEEN = jnp.broadcast_to(jnp.arange(SOURCES) < 3, (TOKENS, SOURCES))


# Post-norm has no branch of a structure's own.
@pytest.mark.parametrize(
    ("structure", "norm_first"),
    [
        (mj.Diagonal, False),
        *(pytest.param(s, True, marks=pytest.mark.slow) for s in ALL_STRUCTURES),
    ],
)
def test_a_certain_block_is_the_plain_block(structure: type[Covariance], norm_first: bool):
    """Its parts are those of an encoder block."""

    def certain(belief):
        return dataclasses.replace(belief, variance=jnp.zeros_like(belief.variance))

    params = jax.tree.map(certain, PARAMS, is_leaf=lambda p: isinstance(p, mj.posterior.Factorized))
    arrays = mj.posterior.sample_params(params, KEYS[3])
    mean, variance = decoder(structure, norm_first)(MEAN, 0.0, params, MEMORY, ~SEEN | SEEN)

    @jax.jit
    def both(arrays):
        block = plain_block(arrays, HEADS, norm_first=norm_first)
        layers = of_layers(arrays, MEAN, MEMORY, norm_first=norm_first, mask=CAUSAL)
        return layers, block(MEAN, MEMORY, CAUSAL)

    with jax.numpy_rank_promotion("allow"):
        plain, network = both(arrays)
    assert_close(network, plain)
    # jax.nn.dot_product_attention takes its softmax in float32, whatever the inputs.
    assert_close(mean, plain, 1e-6)
    assert not variance.any()


@pytest.mark.slow
def test_full_against_samples():
    """Input, memory and weights are random, with noise small enough for the Taylor expansion."""
    params = decoder_params(KEYS[2], 0.1)
    covs = [
        mj.Full(random_dense(key, (n, FEATURES), 0.1))
        for key, n in zip(KEYS[3:5], (TOKENS, SOURCES), strict=True)
    ]
    beliefs = tuple(
        mj.posterior.FullNormal(mean, cov.cov)
        for mean, cov in zip((MEAN, MEMORY), covs, strict=True)
    )

    def network(drawn):
        arrays, (x, memory) = drawn
        return plain_block(arrays, HEADS, norm_first=True)(x, memory)

    with jax.numpy_rank_promotion("allow"):
        truth = mj.monte_carlo(network, (params, beliefs), KEYS[5], 20_000)
    mean, cov = jax.jit(
        lambda c, d: mj.decoder_block(MEAN, c, MEMORY, d, params, num_heads=HEADS, norm_first=True)
    )(*covs)
    ratio = jnp.sqrt(cov.variance()) / truth.standard_deviation
    shift = (mean - truth.mean) / truth.standard_deviation
    assert jnp.mean(shift**2) ** 0.5 < 4 / 20_000**0.5
    assert jnp.abs(ratio - 1).mean() < 0.02
