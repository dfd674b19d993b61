"""The propositions, and the derivation of a Transformer spelled out, beside the fast transforms."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import moment_jax as mj
from moment_jax import reference
from moment_jax.covariance import Full
from moment_jax.expectations import masked_softmax
from moment_jax.layers import AttentionParams, NormParams, full, layer_norm, softmax
from moment_jax.posterior import FullNormal, KroneckerEigen, OutputShared, Point, Posterior
from tests.builders import (
    VECTOR_FAMILIES,
    random_block,
    random_dense,
    random_dense_params,
    random_vector,
)

TOKENS, FEATURES, HIDDEN = 3, 4, 6
FAINT = 1e-8  # share of the noise at which only what is of first order in it is left


def moments_of(seed, *shape, noise=0.3):
    """Random moments, of a sequence unless another shape is given. No block is symmetric."""
    shape, key = shape or (TOKENS, FEATURES), jax.random.key(seed)
    return jax.random.normal(key, shape), random_dense(key, shape, noise)


def norm_of(seed, family):
    keys = jax.random.split(jax.random.key(seed))
    return NormParams(*(random_vector(key, family, FEATURES, 0.3) for key in keys))


def attention_of(seed, *families):
    """The last of the families is that of the output."""
    keys, (family, *others) = jax.random.split(jax.random.key(seed), 4), families
    return AttentionParams(
        *(
            random_dense_params(key, of, (FEATURES, FEATURES), 0.3)
            for key, of in zip(keys, [family] * 3 + (others or [family]), strict=True)
        )
    )


def product_operands():
    """Moments of two independent random matrices, (2, 3) and (3, 2)."""
    return *moments_of(0, 2, 3, noise=1.0), *moments_of(1, 3, 2, noise=1.0)


def faint(params):
    """Beliefs with a small share of their noise."""

    def one(x):
        spread = (name for name in ("variance", "cov") if hasattr(x, name))
        return dataclasses.replace(x, **{name: FAINT * getattr(x, name) for name in spread})

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, Posterior))


def assert_same(moments, expected, rtol=1e-10):
    """Mean and `Full` covariance of a transform are those of a reference."""
    mean, cov = moments
    for got, wanted in ((mean, expected[0]), (cov.cov, expected[1])):
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=rtol * np.abs(wanted).max())


@pytest.fixture
def as_printed(monkeypatch):
    """The softmax of `Full`'s attention with its Jacobian at the mean scores, which keeps all of it."""
    monkeypatch.setattr(full, "expected_softmax", lambda mean, _, mask: masked_softmax(mean, mask))
    monkeypatch.setattr(full.rules, "kept_jacobian", lambda found, *_: (jnp.ones_like(found), None))


KEY = jax.random.key(8)


def test_proposition2_by_the_indices_of_the_derivation():
    mean_a, cov_a, mean_b, cov_b = map(np.asarray, product_operands())
    n, q = mean_a.shape[0], mean_b.shape[1]
    columns_a, columns_b = mean_a, mean_b.T  # the derivation's A is the transpose of ours
    expected = np.zeros((n * q, n * q))
    for i in range(1, n * q + 1):
        for j in range(1, n * q + 1):
            k1, m1 = (i - 1) % n, (i - 1) // n
            k2, m2 = (j - 1) % n, (j - 1) // n
            block_a, block_b = cov_a[k1, :, k2, :], cov_b[:, m1, :, m2]
            expected[i - 1, j - 1] = (
                np.trace(block_a.T @ block_b)
                + columns_a[k1] @ block_b @ columns_a[k2]
                + columns_b[m1] @ block_a @ columns_b[m2]
            )
    stacked = reference.proposition2(mean_a, cov_a, mean_b, cov_b).transpose(1, 0, 3, 2)
    np.testing.assert_allclose(stacked.reshape(n * q, n * q), expected, rtol=1e-12)


def by_autodiff(fn, mean, cov):
    """Sigma -> J Sigma J^T with the Jacobian between all rows."""
    jacobian = jax.jit(jax.jacobian(fn))(mean)
    return np.einsum("tdab,abij,seij->tdse", jacobian, cov, jacobian)


def test_softmax_is_proposition_3_for_every_two_rows():
    mean, cov = moments_of(3, noise=1.0)
    faintly = softmax(mean, Full(FAINT * cov)), reference.softmax(mean, FAINT * cov)
    assert_same(*faintly, rtol=1e-6)
    expected = reference.softmax(mean, cov)
    ours = by_autodiff(jax.nn.softmax, mean, cov)
    np.testing.assert_allclose(expected.cov, ours, rtol=1e-10, atol=1e-14)
    assert np.min(np.abs(expected.cov[0, :, 1])) > 1e-6  # rows 0 and 1 are correlated


def test_layer_norm_is_proposition_4():
    """At faint noise; with any, it divides by the expected variance."""
    mean, cov = moments_of(4)

    @jax.jit
    def both(params):
        fast = layer_norm(mean, Full(FAINT * cov), params, epsilon=1e-3)
        return fast, reference.layer_norm(mean, FAINT * cov, params, epsilon=1e-3)

    for params in (NormParams(), *(norm_of(4, family) for family in VECTOR_FAMILIES)):
        assert_same(*both(faint(params)), rtol=1e-6)
    gain, zeros = jax.random.normal(KEY, FEATURES), jnp.zeros((FEATURES, FEATURES))
    centring = jnp.eye(FEATURES) - 1 / FEATURES
    sampled = 1e-6 + jnp.einsum("ij,tjti->t", centring, cov) / FEATURES
    expected = reference.proposition4(mean, cov, gain, zeros, zeros, epsilon=sampled)
    _, got = layer_norm(mean, Full(cov), NormParams(Point(gain)))
    np.testing.assert_allclose(got.cov, expected, rtol=1e-10, atol=1e-12)


def certain_input(seed):
    mean, cov = moments_of(seed)
    return mean, jnp.zeros_like(cov)


def test_dense_moments_of_another_kind():
    with pytest.raises(TypeError, match="knows no family float"):
        reference.dense_moments(1.0)


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
    got = jax.jit(partial(mj.attention, num_heads=num_heads))(mean, Full(cov), params)
    assert_same(got, expected)


@pytest.mark.usefixtures("as_printed")
def test_heads_of_correlated_kernels_are_not_independent():
    mean, cov = certain_input(14)
    params = attention_of(14, FullNormal, Point)
    identity = mj.DenseParams(Point(jnp.eye(FEATURES)))
    params = mj.AttentionParams(params.query, params.key, params.value, identity)
    _, got = jax.jit(partial(mj.attention, num_heads=2))(mean, Full(cov), params)
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
        branch, branch_cov = mj.attention(mean, cov, params.attention, num_heads=2)
        mean, cov = mj.layer_norm(mean + branch, cov.add(branch_cov), params.norm1)
        branch, branch_cov = mj.feed_forward(mean, cov, params.feed_forward, activation="relu")
        return mj.layer_norm(mean + branch, cov.add(branch_cov), params.norm2)

    assert_same(block(mean, Full(cov), params), expected, rtol=1e-6)


def test_block_with_its_residual_covariance():
    mean, cov = certain_input(17)
    params = faint(random_block(jax.random.key(17), FEATURES, HIDDEN, 0.3, OutputShared))
    got = jax.jit(partial(mj.encoder_block, num_heads=2))(mean, Full(cov), params)

    branch = reference.attention(mean, cov, params.attention, num_heads=2)
    mean, cov = reference.layer_norm(mean + branch.mean, branch.cov, params.norm1)
    branch = reference.feed_forward(mean, cov, params.feed_forward)
    hidden, output = params.feed_forward.hidden, params.feed_forward.output
    inner, inner_cov = reference.dense(mean, cov, hidden)
    gain = norm.cdf(inner / np.sqrt(np.einsum("tdtd->td", inner_cov)))  # E[relu']
    jacobians = np.einsum("if,sf,fo->sio", hidden.kernel.mean, gain, output.kernel.mean)
    cross = jnp.einsum("tdsi,sio->tdso", cov, jacobians)
    total = cov + branch.cov + cross + cross.transpose(2, 3, 0, 1)
    expected = reference.layer_norm(mean + branch.mean, total, params.norm2)
    assert_same(got, expected, rtol=1e-6)
