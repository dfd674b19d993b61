"""float32 against float64 for inputs and parameters of many scales; `pytest -s` prints the errors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.posterior import Posterior
from tests.builders import ALL_STRUCTURES, random_block

SHAPE, HEADS = (4, 6), 2
GAINS = {"x": (1, 10, 100, 1000), "x and parameters": (1, 10, 100)}
BLOCK = random_block(jax.random.key(5), SHAPE[1], 8, 0.1)
MEAN = jax.random.normal(jax.random.key(1), SHAPE)


def transforms(mean, cov, block):
    """Moments by every public transform."""
    yield "dense", mj.dense(mean, cov, block.feed_forward.hidden)
    yield "matmul", mj.matmul(mean, cov, mean.T, type(cov).independent(cov.variance().T))
    yield "relu", mj.relu(mean, cov)
    yield "gelu", mj.gelu(mean, cov)
    yield "tanh", mj.activation(mean, cov, jnp.tanh)
    yield "softmax", mj.softmax(mean, cov)
    yield "layer_norm", mj.layer_norm(mean, cov, block.norm1)
    yield "mean_pool", mj.mean_pool(mean, cov)
    yield "feed_forward", mj.feed_forward(mean, cov, block.feed_forward, activation=mj.gelu)
    yield "attention", mj.attention(mean, cov, block.attention, num_heads=HEADS)
    memory = 0.5 * mean[:3], type(cov).independent(0.01 * cov.variance()[:3])
    yield "cross", mj.cross_attention(mean, cov, *memory, block.attention, num_heads=HEADS)
    yield "encoder", mj.encoder_block(mean, cov, block, num_heads=HEADS)
    decoder = mj.DecoderBlockParams(
        block.attention, block.norm1, block.attention, block.norm2, block.feed_forward, block.norm1
    )
    yield "decoder", mj.decoder_block(mean, cov, *memory, decoder, num_heads=HEADS)


def scaled(params, gain):
    """Parameters multiplied by `gain`."""

    def one(belief):
        return dataclasses.replace(
            belief, mean=gain * belief.mean, variance=gain**2 * belief.variance
        )

    return jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, Posterior))


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_variances_and_gradients(structure):
    def variances(mean, variance, block):
        results = transforms(mean, structure.independent(variance), block)
        return {name: cov.variance() for name, (_, cov) in results}

    def total(*arguments):
        # Normalise each term: a plain sum would overflow float32.
        every = variances(*arguments)
        return sum(
            jnp.sum(variance) / jax.lax.stop_gradient(1 + jnp.max(variance))
            for variance in every.values()
        ), every

    compiled, gradient = jax.jit(variances), jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))
    for of, gains in GAINS.items():
        for gain in gains:
            params = scaled(BLOCK, gain if "parameters" in of else 1)
            arguments = gain * MEAN, jnp.full(SHAPE, 0.01 * gain**2), params
            single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), arguments)
            want, (slopes, got) = compiled(*arguments), gradient(*single)
            steepest = np.max([np.max(np.abs(slope)) for slope in jax.tree.leaves(slopes)])
            print(f"\n{structure.__name__}, {of} times {gain}: greatest slope {steepest:.1e}")
            for name in want:
                error = np.abs(got[name] - want[name])
                # Relative to the entry's own variance, or to 1e-4 of the largest if that is more.
                error = np.max(error / np.maximum(want[name], 1e-4 * np.max(want[name])))
                print(f"  {name:12s} error {error:.1e}, smallest {np.min(got[name]):.1e}")
                assert np.min(got[name]) >= 0, name
                # With x times 100, scores are near 1e4, and the decoder's second attention
                # amplifies the rounding errors of the first.
                if name != "decoder" or gain <= 10:
                    assert error < 0.01, name
            assert np.isfinite(steepest)
