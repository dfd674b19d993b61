"""The fast transforms reproduce the derivation spelled out, where its assumptions hold."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax import reference
from moment_jax.covariance import Full
from moment_jax.layers import (
    AttentionParams,
    DenseParams,
    attention,
    encoder_block,
    feed_forward,
    layer_norm,
    relu,
)
from moment_jax.posterior import Factorized, FullNormal, MatrixNormal, OutputShared, Point
from tests.builders import KERNEL_FAMILIES
from tests.reference.examples import (
    FEATURES,
    TOKENS,
    Examples,
    assert_same,
    name,
)


def compiled(transform, **options):
    return jax.jit(partial(transform, **options))


def certain_input(make):
    mean = make.array(TOKENS, FEATURES)
    return mean, jnp.zeros((*mean.shape, *mean.shape))


@pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=name)
def test_dense_moments_are_what_kernels_add(family):
    make = Examples(10)
    belief = make.belief(family, FEATURES, 2)
    moment = make.array(FEATURES, FEATURES)
    cov = reference.dense_moments(belief).cov
    np.testing.assert_allclose(
        belief.noise_block(moment), jnp.einsum("ij,iojp->op", moment, cov), rtol=1e-10, atol=1e-12
    )
    np.testing.assert_allclose(belief.marginal_variance(), jnp.einsum("ioio->io", cov))


def test_dense_moments_of_another_kind():
    with pytest.raises(TypeError, match="knows no family float"):
        reference.dense_moments(1.0)


def test_relu():
    make = Examples(11, noise=1.0)
    mean, cov = make.array(TOKENS, FEATURES), make.cov(TOKENS, FEATURES)
    cov = cov.at[0].set(0).at[:, :, 0].set(0)  # the first token is certain
    assert_same(jax.jit(relu)(mean, Full(cov)), reference.relu(mean, cov))


# Only dense layers depend on the family, so each family is tested in some parts of the network.
@pytest.mark.parametrize("family", [Factorized, MatrixNormal, FullNormal], ids=name)
def test_attention_with_one_head(family):
    make = Examples(12)
    mean, cov = certain_input(make)
    params = make.attention(family)
    expected = reference.attention(mean, cov, params, num_heads=1)
    assert_same(compiled(attention, num_heads=1, order=1)(mean, Full(cov), params), expected)


@pytest.mark.parametrize(
    ("family", "output_family"),
    [(Point, FullNormal), (Factorized, Point), (OutputShared, MatrixNormal)],
    ids=name,
)
def test_attention_with_independent_heads(family, output_family):
    make = Examples(13)
    mean, cov = certain_input(make)
    params = make.attention(family, output_family)
    expected = reference.attention(mean, cov, params, num_heads=2)
    assert_same(compiled(attention, num_heads=2, order=1)(mean, Full(cov), params), expected)


def test_heads_of_correlated_kernels_are_not_independent():
    make = Examples(14)
    mean, cov = certain_input(make)
    params = make.attention(FullNormal, Point)
    identity = DenseParams(Point(jnp.eye(FEATURES)))
    params = AttentionParams(params.query, params.key, params.value, identity)
    _, got = compiled(attention, num_heads=2, order=1)(mean, Full(cov), params)
    shape = (TOKENS, 2, FEATURES // 2)
    got = got.cov.reshape(*shape, *shape)
    printed = reference.attention(mean, cov, params, num_heads=2).cov.reshape(*shape, *shape)
    for head in range(2):
        same = np.s_[:, head, :, :, head, :]
        np.testing.assert_allclose(got[same], printed[same], rtol=1e-10, atol=1e-12)
    assert np.all(printed[:, 0, :, :, 1, :] == 0)
    assert np.max(np.abs(got[:, 0, :, :, 1, :])) > 1e-3


@pytest.mark.parametrize("family", [OutputShared, MatrixNormal, FullNormal], ids=name)
def test_feed_forward(family):
    make = Examples(15)
    mean, cov = make.array(TOKENS, FEATURES), make.cov(TOKENS, FEATURES)
    params = make.feed_forward(family)
    got = compiled(feed_forward, activation=relu)(mean, Full(cov), params)
    assert_same(got, reference.feed_forward(mean, cov, params))


@pytest.mark.parametrize("family", [Factorized, Point], ids=name)
def test_block_with_independent_residuals(family):
    make = Examples(16)
    mean, cov = certain_input(make)
    params = make.block(family)
    expected = reference.encoder_block(mean, cov, params, num_heads=2)

    @jax.jit
    def block(mean, cov, params):
        branch, branch_cov = attention(mean, cov, params.attention, num_heads=2, order=1)
        mean, cov = layer_norm(mean + branch, cov.add(branch_cov), params.norm1, order=1)
        branch, branch_cov = feed_forward(mean, cov, params.feed_forward, activation=relu)
        return layer_norm(mean + branch, cov.add(branch_cov), params.norm2, order=1)

    assert_same(block(mean, Full(cov), params), expected)


@pytest.mark.parametrize("family", [Factorized, OutputShared], ids=name)
def test_block_with_its_residual_covariance(family):
    make = Examples(17)
    mean, cov = certain_input(make)
    params = make.block(family)
    got = compiled(encoder_block, num_heads=2, order=1)(mean, Full(cov), params)

    branch = reference.attention(mean, cov, params.attention, num_heads=2)
    mean, cov = reference.layer_norm(mean + branch.mean, branch.cov, params.norm1)
    branch = reference.feed_forward(mean, cov, params.feed_forward)
    cross = reference.feed_forward_cross_cov(mean, cov, params.feed_forward)
    total = cov + branch.cov + cross + cross.transpose(2, 3, 0, 1)
    assert_same(got, reference.layer_norm(mean + branch.mean, total, params.norm2))
