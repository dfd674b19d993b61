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
# In this draw of nine, rows with all but 1e-8 of their weight on one key have the most noise.
BLOCK = random_block(jax.random.key(5), SHAPE[1], 8, 0.1)
MEAN = jax.random.normal(jax.random.key(1), SHAPE)


def transforms(mean, cov, block, mask):
    """Moments by every public transform; attention alone is masked."""
    yield "dense", mj.dense(mean, cov, block.feed_forward.hidden)
    yield "matmul", mj.matmul(mean, cov, mean.T, type(cov).independent(cov.variance().T))
    yield "relu", mj.relu(mean, cov)
    yield "gelu", mj.gelu(mean, cov)
    yield "tanh", mj.activation(mean, cov, jnp.tanh)
    yield "softmax", mj.softmax(mean, cov)
    yield "layer_norm", mj.layer_norm(mean, cov, block.norm1)
    yield "mean_pool", mj.mean_pool(mean, cov)
    yield "feed_forward", mj.feed_forward(mean, cov, block.feed_forward, activation=mj.gelu)
    yield "attention", mj.attention(mean, cov, block.attention, num_heads=HEADS, mask=mask)
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


# Every function that these call has its gradient in the decoder's.
WITHOUT_GRADIENT = {"dense", "feed_forward", "encoder"}
EVERY_KEY = np.ones((SHAPE[0], SHAPE[0]), bool)
ONE_KEY = np.broadcast_to(np.arange(SHAPE[0]) == 2, EVERY_KEY.shape)


def single(tree):
    """In float32."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float32), tree)


@pytest.fixture(scope="module", params=ALL_STRUCTURES)
def compiled(request):
    """A structure, its variances by every transform, and the same with slopes."""

    def moments(mean, cov, block, mask):
        return dict(transforms(mean, cov, block, mask))

    def variances(*arguments):
        return {name: cov.variance() for name, (_, cov) in moments(*arguments).items()}

    def total(*arguments):
        every = moments(*arguments)
        terms = [
            term
            for name, (mean, cov) in every.items()
            if name not in WITHOUT_GRADIENT
            for term in (mean**2, cov.variance())
        ]
        # Normalise each term: a plain sum would overflow float32.
        terms = [jnp.sum(term) / jax.lax.stop_gradient(1 + jnp.max(term)) for term in terms]
        return sum(terms), {name: cov.variance() for name, (_, cov) in every.items()}

    gradient = jax.grad(total, (0, 1, 2), has_aux=True)
    return request.param, jax.jit(variances), jax.jit(gradient)


def test_variances_and_gradients(compiled):
    structure, variances, gradient = compiled
    for of, gains in GAINS.items():
        for gain in gains:
            params = scaled(BLOCK, gain if "parameters" in of else 1)
            cov = structure.independent(jnp.full(SHAPE, 0.01 * gain**2))
            arguments = gain * MEAN, cov, params
            want = variances(*arguments, EVERY_KEY)
            slopes, got = gradient(*single(arguments), EVERY_KEY)
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


@pytest.mark.parametrize(
    ("size", "mask"), [(0, EVERY_KEY), (1, EVERY_KEY), (1e4, EVERY_KEY), (1e4, ONE_KEY)]
)
def test_gradients_are_finite_at_zero_variance_and_at_huge_scores(compiled, size, mask):
    structure, _, gradient = compiled
    arguments = size * MEAN, structure.zeros(SHAPE, jnp.float64), scaled(BLOCK, 3)
    for slope in jax.tree.leaves(gradient(*single(arguments), mask)[0]):
        assert np.isfinite(slope).all()
