"""Mean pooling is exact in every structure."""

from __future__ import annotations

import jax
import numpy as np
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
    mask, seen = np.array([True, False, True]), np.array([0, 2])
    pool = jax.jit(lambda *args: (lambda m, c: (m, c.variance()))(*mj.mean_pool(*args)))
    mean, variance = pool(MEAN, cov)
    masked, masked_variance = pool(MEAN, cov, mask)
    dense, tokens = np.asarray(cov.to_dense()), np.asarray(MEAN)
    assert_close(mean, tokens.mean(0, keepdims=True))
    assert_close(variance[0], np.diagonal(dense.mean((0, 2))))
    assert_close(masked[0], tokens[seen].mean(0))
    assert_close(masked_variance[0], np.diagonal(dense[seen][:, :, seen].mean((0, 2))))
