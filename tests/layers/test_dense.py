"""Dense layers, matrix products and mean pooling are exact for every posterior and structure."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.covariance import Covariance
from tests.builders import (
    ALL_STRUCTURES,
    KERNEL_FAMILIES,
    assert_close,
    random_cov,
    random_dense_params,
)

KEYS = jax.random.split(jax.random.key(1), 8)
SHAPE, OUT = (3, 4), 5
MEAN = jax.random.normal(KEYS[0], SHAPE)


def assert_exact(structure, transform, cov, arguments, exact):
    """The transform's moments for each of the arguments are projections of the exact ones."""

    @jax.jit
    def both(cov, exact):
        def one(argument, moments):
            mean, found = transform(MEAN, cov, argument)
            assert type(found) is structure
            projected = structure.project(moments.cov).to_dense()
            variance = jnp.einsum("tdtd->td", moments.cov)
            ours = mean, found.to_dense(), found.variance()
            return ours, (moments.mean, projected, variance)

        return list(map(one, arguments, exact))

    for ours, expected in both(cov, exact):
        for one, other in zip(ours, expected, strict=True):
            assert_close(one, other, 1e-11)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_dense_is_the_projection_of_the_exact_moments(structure: type[Covariance]):
    layers = [random_dense_params(KEYS[2], family, (SHAPE[1], OUT)) for family in KERNEL_FAMILIES]
    cov = random_cov(KEYS[1], structure, SHAPE)
    exact = [mj.reference.dense(MEAN, cov.to_dense(), params) for params in layers]
    assert_exact(structure, mj.dense, cov, layers, exact)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_matmul_is_the_projection_of_the_exact_moments(structure: type[Covariance]):
    others = [random_cov(KEYS[3], other, (SHAPE[1], OUT)) for other in ALL_STRUCTURES]
    cov, mean = random_cov(KEYS[1], structure, SHAPE), jax.random.normal(KEYS[4], (SHAPE[1], OUT))
    kernels = [mj.posterior.FullNormal(mean, other.to_dense()) for other in others]
    exact = [mj.reference.dense(MEAN, cov.to_dense(), mj.DenseParams(kernel)) for kernel in kernels]
    assert_exact(structure, lambda m, c, other: mj.matmul(m, c, mean, other), cov, others, exact)


def test_shared_noise_makes_tokens_correlated():
    """Two equal tokens have correlation one after a random layer."""
    params = random_dense_params(KEYS[2], mj.posterior.Factorized, (4, OUT))
    mean = jnp.broadcast_to(MEAN[:1], (2, 4))
    _, cov = mj.dense(mean, mj.Separable.zeros((2, 4), jnp.float64), params)
    assert_close(cov.tokens, jnp.full((2, 2), cov.tokens[0, 0]))


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_mean_pool_is_exact(structure: type[Covariance]):
    cov = random_cov(KEYS[1], structure, SHAPE)
    mask, seen = np.array([True, False, True]), np.array([0, 2])
    pool = jax.jit(lambda *args: (lambda m, c: (m, c.variance()))(*mj.mean_pool(*args)))
    mean, variance = pool(MEAN, cov)
    masked, masked_variance = pool(MEAN, cov, mask)
    dense, tokens = np.asarray(cov.to_dense()), np.asarray(MEAN)
    assert_close(mean, tokens.mean(0, keepdims=True))
    assert_close(variance[0], np.diagonal(dense.mean((0, 2))))
    assert_close(masked[0], tokens[seen].mean(0))
    assert_close(masked_variance[0], np.diagonal(dense[seen][:, :, seen].mean((0, 2))))
