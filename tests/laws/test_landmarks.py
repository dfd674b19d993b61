"""Token Gram matrices that are known at landmark tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.covariance.token_gram import at_landmarks, factored, whole
from moment_jax.posterior import Factorized
from tests.builders import assert_close, random_block, random_psd

TOKENS, FEATURES, COUNT = 24, 14, 8
KEYS = jax.random.split(jax.random.key(0), 3)
BLOCK = random_block(KEYS[0], FEATURES, 8)
MEAN = jax.random.normal(KEYS[1], (TOKENS, FEATURES))
OTHER = jax.random.normal(KEYS[2], (TOKENS, FEATURES))
VALID = jnp.arange(TOKENS) < 17


@partial(jax.jit, static_argnames="count")
def moments(x, valid, count=COUNT):
    block = partial(mj.encoder_block, num_heads=2, norm_first=True, mask=valid[None])
    cov = mj.Separable.zeros(x.shape, x.dtype, landmarks=count)
    cov = cov.pooled(valid.astype(x.dtype))  # as the first block would, so that a loop can carry it
    return jax.lax.scan(lambda carry, _: (block(*carry, BLOCK), None), (x, cov), length=2)[0]


def test_a_gram_of_low_rank_is_known_in_full():
    """However uneven the tokens' variances are."""
    low = random_psd(KEYS[0], TOKENS, rank=3)
    known = at_landmarks(low, COUNT)
    np.testing.assert_allclose(whole(known), low, atol=0.02 * jnp.max(low))
    scale = jnp.ones(TOKENS).at[0].set(100.0)[:, None]
    uneven = whole(at_landmarks(scale * low * scale.T, COUNT)) / scale / scale.T
    np.testing.assert_allclose(uneven, low, atol=0.02 * jnp.max(low))
    assert_close(jnp.diagonal(whole(known)), jnp.diagonal(low))
    rows = MEAN.T
    assert_close(rows @ factored(known), rows @ whole(known))
    assert_close((known * known).columns, at_landmarks(low * low, COUNT).columns)


def test_indefinite_grams_stay_bounded():
    some = jax.random.normal(KEYS[0], (TOKENS, TOKENS))
    known = whole(at_landmarks(some + some.T, COUNT))
    assert jnp.linalg.eigvalsh(known)[0] > -1e-10
    assert_close(jnp.diagonal(known), jnp.maximum(jnp.diagonal(some + some.T), 0))


@pytest.mark.slow
def test_blocks_at_landmarks_are_near_those_at_all_tokens():
    mean, cov = moments(MEAN, VALID)
    whole_mean, whole_cov = moments(MEAN, VALID, TOKENS)
    off = jnp.abs(cov.sd() / whole_cov.sd() - 1)[VALID]
    assert jnp.mean(off) < 0.02
    assert jnp.max(jnp.abs(mean - whole_mean)[VALID] / whole_cov.sd()[VALID]) < 0.1


@pytest.mark.slow
def test_sharp_attention_to_noisy_values():
    """Terms that cancel are approximated alike: one at landmarks by itself was off by factors."""
    t, d = 48, 8
    near = jnp.exp(-0.5 * (jnp.subtract.outer(jnp.arange(t), jnp.arange(t)) / 3.0) ** 2)

    def dense(key, size, noise, bias_sd=0.0):
        kernel = size * jax.random.normal(key, (d, d)) / d**0.5
        bias = Factorized(jnp.zeros(d), jnp.full(d, bias_sd**2))
        return mj.DenseParams(Factorized(kernel, jnp.full((d, d), noise**2 / d)), bias)

    def sds(key, noise, bias_sd, count):
        query, key, value, output, inputs = jax.random.split(key, 5)
        params = mj.AttentionParams(
            dense(query, 8.0, 0.1), dense(key, 1.0, 0.1), dense(value, 1.0, noise, bias_sd),
            dense(output, 1.0, 0.01),
        )  # fmt: skip
        x = near @ jax.random.normal(inputs, (t, d))
        tokens = at_landmarks(0.01 * d * near, count)
        cov = mj.Separable.unchecked(
            jnp.full((t, d), 0.01), tokens, 0.01 * jnp.sum(near) * jnp.eye(d), jnp.ones(t)
        )
        _, cov = mj.attention(x / jnp.std(x), cov, params, num_heads=2)
        return cov.sd(), cov.map_tokens(jnp.full((1, t), 1 / t)).sd()

    # Three networks each whose values' noise is the kernel's, and the bias's.
    networks = (
        jax.vmap(jax.random.key)(jnp.array([0, 1, 2] * 2)),
        jnp.repeat(jnp.array([0.3, 0.03]), 3),
        jnp.repeat(jnp.array([0.0, 0.5]), 3),
    )
    some, everywhere = (
        jax.jit(jax.vmap(partial(sds, count=count)))(*networks) for count in (12, t)
    )
    tokens, pooled = (jnp.abs(a / b - 1) for a, b in zip(some, everywhere, strict=True))
    assert jnp.max(jnp.mean(tokens, axis=(1, 2))) < 0.05
    assert jnp.max(pooled) < 0.2


@pytest.mark.slow
def test_padding_has_no_influence():
    padded = jnp.where(VALID[:, None], MEAN, 9 + OTHER)
    (mean, cov), (same, expected) = moments(padded, VALID), moments(MEAN, VALID)
    assert_close(mean[VALID], same[VALID])
    assert_close(cov.variance()[VALID], expected.variance()[VALID])
    pooled, known = (c.map_tokens(VALID[None] / VALID.sum()) for c in (cov, expected))
    assert_close(pooled.features, known.features)


@pytest.mark.slow
def test_gradient_of_attention():
    """Whose formulas are those with Gram matrices at landmarks."""

    def loss(x):
        cov = mj.Separable.independent(0.1 + x**2)
        cov = mj.Separable.unchecked(
            cov.variances, at_landmarks(cov.tokens, COUNT), cov.features, VALID.astype(x.dtype)
        )
        found = mj.attention(x, cov, BLOCK.attention, num_heads=2, mask=VALID[None])
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(found))

    step = 1e-5 * OTHER
    both = jax.jit(
        lambda: (jax.grad(loss)(MEAN), jax.lax.map(loss, jnp.stack([MEAN + step, MEAN - step])))
    )
    slopes, (after, before) = both()
    assert jnp.all(jnp.isfinite(slopes))
    assert_close(np.vdot(slopes, OTHER), (after - before) / 2e-5, 1e-6)


def test_what_does_not_fit_says_so():
    zeros = partial(mj.Separable.zeros, (9, 2))
    few, many = jax.eval_shape(lambda: (zeros(landmarks=99), mj.Separable.zeros((300, 2))))
    assert few.tokens.shape == (9, 9)
    assert many.tokens.columns.shape == (300, 64)
    for count in (0, -1, 2.0):
        with pytest.raises(ValueError, match=rf"positive number .* Got {count}. .* landmarks=T"):
            zeros(landmarks=count)
    with pytest.raises(ValueError, match=r"Got 4 and 3\. Begin both"):
        jax.eval_shape(lambda: zeros(landmarks=4).add(zeros(landmarks=3)))
    mask = np.tril(np.ones((TOKENS, TOKENS), bool))

    def causal():
        cov = mj.Separable.zeros(MEAN.shape, landmarks=4)
        return mj.attention(MEAN, cov, BLOCK.attention, num_heads=2, mask=mask)

    with pytest.raises(ValueError, match=r"Got 4 of 24 .* landmarks=24"):
        jax.eval_shape(causal)
