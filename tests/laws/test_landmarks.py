"""Attention by landmarks for long sequences agrees with `Separable` over all queries."""

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
from moment_jax.layers.attention.multi_head import attention_and_tangent
from moment_jax.layers.residual import residual
from moment_jax.layers.seen import pool_seen
from moment_jax.xla import diagonal_of
from tests.builders import random_block, random_psd

pytestmark = pytest.mark.slow

KEYS = jax.random.split(jax.random.key(1), 8)
ATTENTION = "moment_jax.layers.attention."
TOKENS = 64


@register_fields
@dataclasses.dataclass(frozen=True)
class FewLandmarks(mj.Separable):
    """Few enough landmarks that 64 tokens use them."""

    landmarks = 8


def smooth(num_tokens, num_features):
    """A slowly varying sequence."""
    coarse = jax.random.normal(KEYS[1], (8, num_features))
    return jax.image.resize(coarse, (num_tokens, num_features), "cubic")


@functools.partial(jax.jit, static_argnums=0)
def attended(structure, params, x, mask=None):
    """Mean, variance, token Gram matrix and variance of the token sum after attention and its residual.

    The rest of a block knows nothing of landmarks.
    """
    cov = structure.independent(jnp.full_like(x, 0.01)).add(
        structure.shared(len(x), jnp.full_like(x[0], 0.02))
    )
    cov = pool_seen(cov.add(cov.map_features(params.attention.output.kernel.mean)), mask)
    options = {"num_heads": 2, "mask": mask, "order": 2}
    mean, cov = residual(x, cov, *attention_and_tangent(x, cov, params.attention, **options))
    return mean, cov.variance(), cov.token_gram(), diagonal_of(cov.feature_gram())


def crossed(structure, params, x):
    """The same after attention to a random memory."""
    cov, memory = structure.zeros(x.shape, x.dtype), x[1:]
    memory_cov = structure.independent(jnp.full_like(memory, 0.01))
    mean, cov = mj.cross_attention(x, cov, memory, memory_cov, params.attention, num_heads=2)
    return mean, cov.variance(), cov.token_gram(), diagonal_of(cov.feature_gram())


def choose_by(choose, monkeypatch):
    for name in ("landmark_head", "values", "separable"):
        monkeypatch.setattr(sys.modules[ATTENTION + name], "choose_landmarks", choose)


@pytest.fixture
def every_query(monkeypatch):
    """Make every query a landmark and the ridge negligible."""
    choose_by(lambda size, count, exists: jnp.arange(size.size), monkeypatch)
    monkeypatch.setattr(sys.modules[f"{ATTENTION}landmarks"], "_RIDGE", 1e-9)
    monkeypatch.setattr(sys.modules[f"{ATTENTION}separable"], "by_landmarks", lambda inputs: True)


def padded(structure, params, x):
    """`attended` where the last token is padding."""
    mask = jnp.arange(len(x))[None, :] < len(x) - 1
    mean, variance, gram, sum_variance = attended.__wrapped__(structure, params, x, mask)
    return mean[:-1], variance[:-1], gram[:-1, :-1], sum_variance


@pytest.mark.parametrize(
    ("layer", "family"),
    [(padded, mj.posterior.MatrixNormal), (crossed, mj.posterior.Factorized)],
)
def test_with_every_query_a_landmark_it_is_separable(family, layer, request):
    params = random_block(KEYS[0], 16, 32, family=family, scale=0.3)
    x = jax.random.normal(KEYS[1], (6, 16))

    def run():
        return jax.jit(lambda params, x: layer(mj.Separable, params, x))(params, x)

    expected = run()
    request.getfixturevalue("every_query")
    for actual, exact in zip(run(), expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-5)
        assert np.any(actual != exact), "the same program"


PARAMS, X = random_block(KEYS[0], 16, 32), smooth(TOKENS, 16)


@pytest.fixture(scope="module")
def exact_and_few():
    """Moments of a smooth sequence by all tokens, and by eight landmarks."""
    return [attended(s, PARAMS, X) for s in (mj.Separable, FewLandmarks)]


def test_few_landmarks_suffice_for_smooth_tokens(exact_and_few):
    (mean, variance, gram, sum_variance), few = exact_and_few
    assert jnp.max((few[0] - mean) ** 2 / variance) < 0.05**2
    np.testing.assert_allclose(few[1], variance, rtol=0.05)
    np.testing.assert_allclose(few[3], sum_variance, rtol=0.05)
    assert jnp.linalg.norm(few[2] - gram) < 0.03 * jnp.linalg.norm(gram)


def test_few_landmarks_against_sampled_networks():
    """Tokens that differ, and scores with a sd of about two."""
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
    assert found.mean_error < 0.016 + 0.015, found  # 0.016 is the sampled mean's own error


def test_no_correlation_exceeds_one(exact_and_few):
    gram = exact_and_few[1][2]
    root = jnp.sqrt(jnp.diagonal(gram))
    assert jnp.linalg.eigvalsh(gram)[0] > -1e-6 * jnp.trace(gram)
    assert jnp.max(jnp.abs(gram) - root[:, None] * root[None, :]) < 1e-12


def test_a_batch_with_padding_equals_its_sequences(exact_and_few):
    padding = 3 * jax.random.normal(KEYS[6], (9, 16))
    longer = jnp.stack([jnp.concatenate((x, padding)) for x in (X, X[::-1])])
    mask = jnp.arange(longer.shape[1])[None, :] < TOKENS
    batch = jax.vmap(lambda x: attended(FewLandmarks, PARAMS, x, mask))(longer)
    mean, variance, gram = (part[0, :TOKENS] for part in batch[:3])
    for alone, beside in zip(exact_and_few[1], (mean, variance, gram[:, :TOKENS]), strict=False):
        np.testing.assert_allclose(beside, alone, rtol=1e-6, atol=1e-8)


def own_attention(cov, mask=None):
    return mj.attention(X, cov, PARAMS.attention, num_heads=2, mask=mask)


def of_pooled_queries(cov):
    cov = cov.pooled(jnp.arange(TOKENS) == 0)
    memory = X, type(cov).zeros(X.shape, X.dtype)
    return mj.cross_attention(X, cov, *memory, PARAMS.attention, num_heads=2)


@pytest.mark.parametrize(
    ("attend", "precision", "by_landmarks"),
    [
        (own_attention, None, True),
        # bfloat16 is too coarse for the regression.
        (own_attention, "bfloat16", False),
        # Landmarks would leak later tokens.
        (lambda cov: own_attention(cov, jnp.tril(jnp.ones((TOKENS, TOKENS), bool))), None, False),
        # A causal decoder pools its first token: landmarks would be that token, or later ones.
        (of_pooled_queries, None, False),
    ],
)
def test_where_every_token_is_used(attend, precision, by_landmarks, monkeypatch):
    chosen = []

    def choose(size, count, exists):
        chosen.append(count)
        return jnp.arange(count)

    choose_by(choose, monkeypatch)
    with jax.default_matmul_precision(precision):
        jax.eval_shape(lambda: attend(FewLandmarks.independent(jnp.full_like(X, 0.01))))
    assert bool(chosen) == by_landmarks


def test_landmarks_do_not_depend_on_the_pool():
    """Without a mask, pooling one token leaves the variances of the others unchanged."""

    @functools.partial(jax.jit, static_argnums=0)
    def variance(structure):
        cov = structure.independent(jnp.full_like(X, 0.01)).pooled(jnp.arange(TOKENS) == 0)
        return own_attention(cov)[1].variance()

    few, exact = map(variance, (FewLandmarks, mj.Separable))
    np.testing.assert_allclose(few, exact, rtol=0.1)


@jax.jit
def _slopes(params, x):
    def loss(params, x):
        mean, variance, gram, _ = attended(FewLandmarks, params, x)
        return jnp.mean(mean) + jnp.mean(variance) + jnp.mean(gram)

    return jax.value_and_grad(loss, (0, 1))(params, x)


def test_float32_stays_finite():
    """Values and gradients, with certain weights and with scores that saturate the softmax."""
    with jax.enable_x64(False):
        for scale, size in ((0.0, 1.0), (0.1, 1.0), (1.0, 10.0)):
            params = random_block(KEYS[0], 16, 32, scale=scale)
            params = jax.tree.map(lambda leaf, s=size: s * leaf.astype(jnp.float32), params)
            result = _slopes(params, X.astype(jnp.float32))
            assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(result)), scale


def test_regression_is_exact_on_landmarks_and_on_shared_values():
    gram = random_psd(KEYS[3], 12, rank=4) + 3.0
    landmarks = gram[:, :6]
    regression = Regression.on(landmarks[:6])
    np.testing.assert_allclose(regression.between(landmarks, landmarks), gram, rtol=0.05)
    common = jnp.full((5, 3), 2.0)
    np.testing.assert_allclose(Regression.on(common[:3]).between(common, common), 2.0)
