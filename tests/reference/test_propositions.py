"""The propositions beside the fast transforms, their textbook forms, and the sampled truth."""

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax import reference
from moment_jax.covariance import Full
from moment_jax.layers import NormParams, layer_norm, softmax
from moment_jax.posterior import Point
from tests.builders import VECTOR_FAMILIES
from tests.reference.examples import (
    FAINT,
    FEATURES,
    assert_same,
    faint,
    moments_of,
    norm_of,
    product_operands,
)

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
    np.testing.assert_allclose(
        expected.cov, by_autodiff(jax.nn.softmax, mean, cov), rtol=1e-10, atol=1e-14
    )
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
