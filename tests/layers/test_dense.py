"""Dense layers and matrix products are exact for every posterior and structure."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.covariance import Covariance, Full
from moment_jax.posterior import Posterior
from tests.builders import (
    ALL_STRUCTURES,
    KERNEL_FAMILIES,
    assert_close,
    random_cov,
    random_dense,
    random_dense_params,
)

KEYS = jax.random.split(jax.random.key(1), 8)
SHAPE, OUT = (3, 4), 5
MEAN = jax.random.normal(KEYS[0], SHAPE)


def textbook_product(mean_a, cov_a, mean_b, cov_b):
    """Prop. 1 and 2 with one sum over both inner indices."""
    moment = cov_a + jnp.einsum("ti,sj->tisj", mean_a, mean_a)
    cov = jnp.einsum("tisj,iojp->tosp", moment, cov_b) + jnp.einsum(
        "io,tisj,jp->tosp", mean_b, cov_a, mean_b
    )
    return mean_a @ mean_b, cov


def kernel_cov(kernel: Posterior):
    """The dense covariance of a kernel, from blocks of unit moments."""
    rows = kernel.shape[0]
    unit = jnp.eye(rows * rows).reshape(rows, rows, rows, rows)
    return kernel.noise_block(unit).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_dense_is_the_projection_of_the_exact_moments(structure: type[Covariance]):
    layers = [random_dense_params(KEYS[2], family, (SHAPE[1], OUT)) for family in KERNEL_FAMILIES]

    @jax.jit
    def both(cov):
        def one(params):
            mean, result = mj.dense(MEAN, cov, params)
            assert type(result) is structure
            expected_mean, expected = textbook_product(
                MEAN, cov.to_dense(), params.kernel.mean, kernel_cov(params.kernel)
            )
            bias = params.bias.vector_cov()
            bias = jnp.diag(bias) if bias.ndim == 1 else bias
            expected = expected + bias[None, :, None, :]
            projected = structure.project(expected).to_dense()
            return (mean, result.to_dense(), result.variance()), (
                expected_mean + params.bias.mean[None],
                projected,
                jnp.einsum("tdtd->td", expected),
            )

        return [one(params) for params in layers]

    for family, pair in zip(
        KERNEL_FAMILIES, both(random_cov(KEYS[1], structure, SHAPE)), strict=True
    ):
        assert_all_close(*pair, family.__name__)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_matmul_is_the_projection_of_the_exact_moments(structure: type[Covariance]):
    others = [random_cov(KEYS[3], other, (SHAPE[1], OUT)) for other in ALL_STRUCTURES]
    mean_b = jax.random.normal(KEYS[4], (SHAPE[1], OUT))

    @jax.jit
    def both(cov_a):
        def one(cov_b):
            mean, result = mj.matmul(MEAN, cov_a, mean_b, cov_b)
            expected_mean, expected = textbook_product(
                MEAN, cov_a.to_dense(), mean_b, cov_b.to_dense()
            )
            projected = structure.project(expected).to_dense()
            return (mean, result.to_dense()), (expected_mean, projected)

        return [one(cov_b) for cov_b in others]

    for other, pair in zip(
        ALL_STRUCTURES, both(random_cov(KEYS[1], structure, SHAPE)), strict=True
    ):
        assert_all_close(*pair, other.__name__)


def assert_all_close(actual, expected, name: str) -> None:
    for ours, textbook in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, textbook, rtol=0, atol=1e-10, err_msg=name)


def test_matmul_agrees_with_samples_of_full_operands():
    """`random_dense` has asymmetric cross-covariance blocks, for which the printed formula is wrong."""
    cov_a, cov_b = random_dense(KEYS[1], SHAPE), random_dense(KEYS[3], (SHAPE[1], 2))
    mean_b = jax.random.normal(KEYS[4], (SHAPE[1], 2))
    _, cov = jax.jit(mj.matmul)(MEAN, Full(cov_a), mean_b, Full(cov_b))

    rng = np.random.default_rng(0)

    def draw(mean, cov):
        root = np.linalg.cholesky(np.reshape(cov, (mean.size, mean.size)))
        noise = rng.standard_normal((200_000, mean.size)) @ root.T
        return np.asarray(mean).reshape(1, -1) + noise, mean.shape

    (a, shape_a), (b, shape_b) = draw(MEAN, cov_a), draw(mean_b, cov_b)
    product = (a.reshape(-1, *shape_a) @ b.reshape(-1, *shape_b)).reshape(-1, 6)
    centred = product - product.mean(0)
    pairs = centred[:, :, None] * centred[:, None, :]
    error = pairs.std(0) / product.shape[0] ** 0.5
    assert np.max(np.abs(pairs.mean(0) - cov.cov.reshape(6, 6)) / error) < 5


def test_shared_noise_makes_tokens_correlated():
    """Two equal tokens have correlation one after a random layer."""
    params = random_dense_params(KEYS[2], mj.posterior.Factorized, (4, OUT))
    mean = jnp.broadcast_to(MEAN[:1], (2, 4))
    _, cov = mj.dense(mean, mj.TokenCorrelated.zeros((2, 4), jnp.float64), params)
    assert_close(cov.correlation, jnp.ones((2, 2)))
