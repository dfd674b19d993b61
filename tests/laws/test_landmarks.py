"""Attention over long sequences, by landmarks: `Separable` itself where every query is one."""

from __future__ import annotations

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.covariance.fields import register_fields
from moment_jax.layers.attention.landmarks import Regression
from moment_jax.xla import diagonal_of
from tests.builders import random_block, random_psd

pytestmark = pytest.mark.slow

KEYS = jax.random.split(jax.random.key(1), 8)
ATTENTION = "moment_jax.layers.attention."
TOKENS = 64


@register_fields
@dataclasses.dataclass(frozen=True)
class FewLandmarks(mj.Separable):
    """So few landmarks that 64 tokens are read by them."""

    landmarks = 8


def smooth(num_tokens, num_features):
    """A sequence of tokens that change slowly."""
    coarse = jax.random.normal(KEYS[1], (8, num_features))
    return jax.image.resize(coarse, (num_tokens, num_features), "cubic")


@functools.partial(jax.jit, static_argnums=0)
def block(structure, params, x, mask=None):
    """Mean, variance, token Gram matrix and variance of the sum, of a block's output for random x."""
    cov = structure.independent(jnp.full_like(x, 0.01)).add(
        structure.shared(len(x), jnp.full_like(x[0], 0.02))
    )
    cov = cov.add(cov.map_features(params.attention.output.kernel.mean))
    mean, cov = mj.encoder_block(x, cov, params, num_heads=2, activation=mj.gelu, mask=mask)
    return mean, cov.variance(), cov.token_gram(), diagonal_of(cov.feature_gram())


@functools.partial(jax.jit, static_argnums=0)
def crossed(structure, params, x):
    """The same of attention to a random memory."""
    cov, memory = structure.zeros(x.shape, x.dtype), x[1:]
    memory_cov = structure.independent(jnp.full_like(memory, 0.01))
    mean, cov = mj.cross_attention(x, cov, memory, memory_cov, params.attention, num_heads=2)
    return mean, cov.variance(), cov.token_gram(), diagonal_of(cov.feature_gram())


@pytest.fixture
def every_query(monkeypatch):
    """Every query is a landmark, and the ridge next to nothing."""
    for name in ("landmark_head", "values", "separable"):
        module = sys.modules[ATTENTION + name]
        monkeypatch.setattr(
            module, "choose_landmarks", lambda size, count, exists: jnp.arange(size.size)
        )
    monkeypatch.setattr(sys.modules[f"{ATTENTION}landmarks"], "_RIDGE", 1e-9)
    monkeypatch.setattr(sys.modules[f"{ATTENTION}separable"], "by_landmarks", lambda inputs: True)


def padded(structure, params, x):
    """`block` where the last token is padding."""
    mean, variance, gram, _ = block(structure, params, x, jnp.arange(len(x))[None, :] < len(x) - 1)
    return mean[:-1], variance[:-1], gram[:-1, :-1]


@pytest.mark.parametrize(
    ("layer", "family"),
    [
        (padded, mj.posterior.Factorized),
        (crossed, mj.posterior.Factorized),
        (block, mj.posterior.MatrixNormal),
    ],
)
def test_with_every_query_a_landmark_it_is_separable(family, layer, request):
    params = random_block(KEYS[0], 16, 32, family=family, scale=0.3)
    x = jax.random.normal(KEYS[1], (6, 16))
    expected = layer(mj.Separable, params, x)
    request.getfixturevalue("every_query")
    jax.clear_caches()
    for actual, exact in zip(layer(mj.Separable, params, x), expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def exact_and_few():
    """Of smooth tokens by all of them, and by eight landmarks."""
    params, x = random_block(KEYS[0], 16, 32), smooth(TOKENS, 16)
    return [block(s, params, x) for s in (mj.Separable, FewLandmarks)]


def test_few_landmarks_do_for_many_tokens(exact_and_few):
    (mean, variance, gram, sum_variance), few = exact_and_few
    assert jnp.max((few[0] - mean) ** 2 / variance) < 0.05**2
    np.testing.assert_allclose(few[1], variance, rtol=0.05)
    np.testing.assert_allclose(few[3], sum_variance, rtol=0.05)
    assert jnp.linalg.norm(few[2] - gram) < 0.03 * jnp.linalg.norm(gram)


def test_few_landmarks_against_sampled_networks():
    """Of tokens that differ, and scores of a sd of about two."""
    layer = mj.nn.EncoderBlock(
        16, 2, hidden_features=32, norm_first=True, relative_scale=0.1, rngs=nnx.Rngs(0)
    )
    params = layer.params
    sharper = jax.tree.map(lambda leaf: 2 * leaf, params.attention.query.kernel.mean)
    kernel = dataclasses.replace(params.attention.query.kernel, mean=sharper)
    query = dataclasses.replace(params.attention.query, kernel=kernel)
    params = dataclasses.replace(
        params, attention=dataclasses.replace(params.attention, query=query)
    )
    x = smooth(TOKENS, 16) + 0.5 * jax.random.normal(KEYS[4], (TOKENS, 16))
    x = x.astype(jnp.float32)

    @jax.jit
    def agreement(x):
        with jax.numpy_rank_promotion("allow"):  # Flax's layers promote
            truth = mj.monte_carlo(lambda p: layer.network(p)(x), params, KEYS[5], 4000)
        mean, cov = layer.moments(x, FewLandmarks.zeros(x.shape, x.dtype), params, None)
        return mean, jnp.sqrt(cov.variance()), truth.mean, truth.standard_deviation

    found = mj.reference.Agreement.of(*agreement(x))
    assert 0.97 < found.sd_ratio < 1.03, found
    assert found.mean_error < 0.016 + 0.015, found  # of which the sampled mean's own is 0.016


def test_no_more_correlated_than_one(exact_and_few):
    gram = exact_and_few[1][2]
    root = jnp.sqrt(jnp.diagonal(gram))
    assert jnp.linalg.eigvalsh(gram)[0] > -1e-6 * jnp.trace(gram)
    assert jnp.max(jnp.abs(gram) - root[:, None] * root[None, :]) < 1e-12


BOTH = FewLandmarks, mj.Separable


def program(structure, mask=None):
    """What `block` is traced to."""
    params, x = random_block(KEYS[0], 16, 32), smooth(TOKENS, 16)
    return str(jax.make_jaxpr(lambda x: block.__wrapped__(structure, params, x, mask))(x))


def test_padding_is_not_seen(exact_and_few):
    """Whatever stands there."""
    params, x = random_block(KEYS[0], 16, 32), smooth(TOKENS, 16)
    longer = jnp.concatenate((x, 3 * jax.random.normal(KEYS[6], (9, 16))))
    mask = jnp.arange(len(longer))[None, :] < TOKENS
    mean, variance, gram, _ = block(FewLandmarks, params, longer, mask)
    found = mean[:TOKENS], variance[:TOKENS], gram[:TOKENS, :TOKENS]
    for alone, beside in zip(exact_and_few[1][:3], found, strict=True):
        np.testing.assert_allclose(beside, alone, rtol=1e-6, atol=1e-8)


def test_under_a_causal_mask_every_token_counts():
    """Landmarks would tell a token of later ones."""
    few, exact = (program(s, jnp.tril(jnp.ones((TOKENS, TOKENS), bool))) for s in BOTH)
    assert few == exact


def test_queries_that_pool_some_tokens_all_count_before_a_memory():
    """A causal decoder pools its first token; landmarks would be that one, or later ones."""
    params, x = random_block(KEYS[0], 16, 32).attention, smooth(TOKENS, 16)

    def looked(structure):
        cov, memory = structure.zeros(x.shape, x.dtype), structure.zeros(x.shape, x.dtype)
        cov = cov.pooled(jnp.arange(TOKENS) == 0)
        return str(
            jax.make_jaxpr(lambda x: mj.cross_attention(x, cov, x, memory, params, num_heads=2)[0])(
                x
            )
        )

    assert looked(FewLandmarks) == looked(mj.Separable)


def test_landmarks_are_of_all_tokens_whatever_is_pooled():
    """Without a mask a pool of one token leaves the others' variances as they are."""
    params, x = random_block(KEYS[0], 16, 32), smooth(TOKENS, 16)

    @functools.partial(jax.jit, static_argnums=0)
    def variance(structure):
        cov = structure.independent(jnp.full_like(x, 0.01)).pooled(jnp.arange(TOKENS) == 0)
        return mj.attention(x, cov, params.attention, num_heads=2)[1].variance()

    few, exact = map(variance, (FewLandmarks, mj.Separable))
    np.testing.assert_allclose(few, exact, rtol=0.1)


def test_with_products_in_bfloat16_every_token_counts():
    """What comes in is too coarse for a regression."""
    few, exact = map(program, BOTH)
    assert few != exact
    with jax.default_matmul_precision("bfloat16"):
        few, exact = map(program, BOTH)
    assert few == exact


def test_a_batch_is_its_sequences(exact_and_few):
    params, x = random_block(KEYS[0], 16, 32), smooth(TOKENS, 16)
    batch = jax.vmap(lambda x: block(FewLandmarks, params, x))(jnp.stack((x, x[::-1])))
    for alone, together in zip(exact_and_few[1], batch, strict=True):
        np.testing.assert_allclose(together[0], alone, rtol=1e-8, atol=1e-10)


@jax.jit
def _slopes(params, x):
    def loss(params, x):
        mean, variance, gram, _ = block(FewLandmarks, params, x)
        return jnp.mean(mean) + jnp.mean(variance) + jnp.mean(gram)

    return jax.value_and_grad(loss, (0, 1))(params, x)


def test_float32_stays_finite():
    """With certain weights, and with scores so large that rows have one key left; derivatives too."""
    with jax.enable_x64(False):
        for scale, size in ((0.0, 1.0), (0.1, 1.0), (1.0, 10.0)):
            params = random_block(KEYS[0], 16, 32, scale=scale)
            params = jax.tree.map(lambda leaf, s=size: s * leaf.astype(jnp.float32), params)
            result = _slopes(params, smooth(TOKENS, 16).astype(jnp.float32))
            assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(result)), scale


def test_regression_is_exact_on_landmarks_and_on_what_they_share():
    gram = random_psd(KEYS[3], 12, rank=4) + 3.0
    landmarks = gram[:, :6]
    regression = Regression.on(landmarks[:6])
    np.testing.assert_allclose(regression.between(landmarks, landmarks), gram, rtol=0.05)
    common = jnp.full((5, 3), 2.0)
    np.testing.assert_allclose(Regression.on(common[:3]).between(common, common), 2.0)
