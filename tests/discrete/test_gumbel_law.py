"""Draws of the Gumbel law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import moment_jax as mj


@pytest.fixture(scope="module")
def draws():
    found = jax.jit(lambda key: mj.discrete.gumbel(key, (2_000_000,)))(jax.random.key(0))
    assert found.dtype == jnp.float32
    return np.asarray(found)


def test_draws_follow_the_law(draws):
    """Kolmogorov and Smirnov in the middle, and both tails by their counts."""
    assert scipy.stats.kstest(draws.astype(np.float64), "gumbel_r").pvalue > 1e-3
    for bound, expected in ((12.0, -np.expm1(-np.exp(-12.0))), (-2.3, np.exp(-np.exp(2.3)))):
        count = np.sum(draws > bound if bound > 0 else draws < bound)
        mean = expected * draws.size
        assert abs(count - mean) < 5 * mean**0.5


def test_draws_go_beyond_the_uniform_numbers_of_float32(draws):
    """With 23 bits no draw would be above 16.7 nor below -2.8; seen only if the tails are there."""
    assert np.isfinite(draws).all()
    assert len(np.unique(draws[draws > 10])) > 0.9 * np.sum(draws > 10)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_types_and_shapes(dtype):
    draws = mj.discrete.gumbel(jax.random.key(0), [3, 2], dtype)
    assert draws.shape == (3, 2)
    assert draws.dtype == dtype
    with pytest.raises(TypeError, match=r"floating-point dtype.*int32"):
        mj.discrete.gumbel(jax.random.key(0), (3,), jnp.int32)
