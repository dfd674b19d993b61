"""Mean pooling is exact in every structure."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from moment_jax.covariance import Covariance
from tests.builders import ALL_STRUCTURES, assert_close, random_cov

KEYS = jax.random.split(jax.random.key(1), 8)
SHAPE = (3, 4)
MEAN = jax.random.normal(KEYS[0], SHAPE)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_mean_pool_is_exact(structure: type[Covariance]):
    cov = random_cov(KEYS[1], structure, SHAPE)
    mean, pooled = mj.mean_pool(MEAN, cov)
    assert_close(mean, MEAN.mean(0, keepdims=True))
    expected = cov.to_dense().mean((0, 2))
    assert_close(pooled.variance()[0], jnp.diagonal(expected))
    mask = jnp.array([True, False, True])
    masked, masked_cov = mj.mean_pool(MEAN, cov, mask)
    assert_close(masked[0], MEAN[jnp.array([0, 2])].mean(0))
    kept = cov.to_dense()[jnp.array([0, 2])][:, :, jnp.array([0, 2])].mean((0, 2))
    assert_close(masked_cov.variance()[0], jnp.diagonal(kept))
