"""The fast transforms reproduce the derivation spelled out, where its assumptions hold."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax import reference
from moment_jax.covariance import Full
from moment_jax.expectations import masked_softmax
from moment_jax.layers import (
    AttentionParams,
    DenseParams,
    attention,
    encoder_block,
    feed_forward,
    full,
    layer_norm,
    relu,
)
from moment_jax.posterior import FullNormal, KroneckerEigen, OutputShared, Point
from tests.builders import random_block
from tests.reference.examples import (
    FEATURES,
    HIDDEN,
    TOKENS,
    assert_same,
    attention_of,
    faint,
    moments_of,
)


def compiled(transform, **options):
    return jax.jit(partial(transform, **options))


@pytest.fixture
def as_printed(monkeypatch):
    """The softmax of `Full`'s attention with its Jacobian at the mean scores, which keeps all of it."""
    monkeypatch.setattr(full, "expected_softmax", lambda mean, _, mask: masked_softmax(mean, mask))
    monkeypatch.setattr(full.rules, "kept_jacobian", lambda found, *_: (jnp.ones_like(found), None))


def certain_input(seed):
    mean, cov = moments_of(seed)
    return mean, jnp.zeros_like(cov)


def test_dense_moments_of_another_kind():
    with pytest.raises(TypeError, match="knows no family float"):
        reference.dense_moments(1.0)


def test_relu():
    mean, cov = moments_of(11, noise=1.0)
    cov = cov.at[0].set(0).at[:, :, 0].set(0)  # the first token is certain
    assert_same(jax.jit(relu)(mean, Full(cov)), reference.relu(mean, cov))


# Only dense layers depend on the family, so each family is tested in some parts of the network.
@pytest.mark.parametrize(
    ("num_heads", "families"),
    [(1, [FullNormal]), (2, [Point, FullNormal]), (2, [OutputShared, KroneckerEigen])],
)
@pytest.mark.usefixtures("as_printed")
def test_attention_with_independent_heads(num_heads, families):
    mean, cov = certain_input(12)
    params = attention_of(12, *families)
    expected = reference.attention(mean, cov, params, num_heads=num_heads)
    got = compiled(attention, num_heads=num_heads)(mean, Full(cov), params)
    assert_same(got, expected)


@pytest.mark.usefixtures("as_printed")
def test_heads_of_correlated_kernels_are_not_independent():
    mean, cov = certain_input(14)
    params = attention_of(14, FullNormal, Point)
    identity = DenseParams(Point(jnp.eye(FEATURES)))
    params = AttentionParams(params.query, params.key, params.value, identity)
    _, got = compiled(attention, num_heads=2)(mean, Full(cov), params)
    shape = (TOKENS, 2, FEATURES // 2)
    got = got.cov.reshape(*shape, *shape)
    printed = reference.attention(mean, cov, params, num_heads=2).cov.reshape(*shape, *shape)
    for head in range(2):
        same = np.s_[:, head, :, :, head, :]
        np.testing.assert_allclose(got[same], printed[same], rtol=1e-10, atol=1e-12)
    assert np.all(printed[:, 0, :, :, 1, :] == 0)
    assert np.max(np.abs(got[:, 0, :, :, 1, :])) > 1e-3


def test_block_with_independent_residuals():
    mean, cov = certain_input(16)
    params = faint(random_block(jax.random.key(16), FEATURES, HIDDEN, 0.3))
    expected = reference.encoder_block(mean, cov, params, num_heads=2)

    @jax.jit
    def block(mean, cov, params):
        branch, branch_cov = attention(mean, cov, params.attention, num_heads=2)
        mean, cov = layer_norm(mean + branch, cov.add(branch_cov), params.norm1)
        branch, branch_cov = feed_forward(mean, cov, params.feed_forward, activation="relu")
        return layer_norm(mean + branch, cov.add(branch_cov), params.norm2)

    assert_same(block(mean, Full(cov), params), expected, rtol=1e-6)


def test_block_with_its_residual_covariance():
    mean, cov = certain_input(17)
    params = faint(random_block(jax.random.key(17), FEATURES, HIDDEN, 0.3, OutputShared))
    got = compiled(encoder_block, num_heads=2)(mean, Full(cov), params)

    branch = reference.attention(mean, cov, params.attention, num_heads=2)
    mean, cov = reference.layer_norm(mean + branch.mean, branch.cov, params.norm1)
    branch = reference.feed_forward(mean, cov, params.feed_forward)
    cross = reference.feed_forward_cross_cov(mean, cov, params.feed_forward)
    total = cov + branch.cov + cross + cross.transpose(2, 3, 0, 1)
    expected = reference.layer_norm(mean + branch.mean, total, params.norm2)
    assert_same(got, expected, rtol=1e-6)
