"""The Gumbel law against the notes' formulas and scipy, and draws against the law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import moment_jax as mj
from tests.builders import assert_close

POINTS = jnp.linspace(-6.0, 40.0, 400, dtype=jnp.float64)
EXTREME = jnp.asarray([-jnp.inf, -1e30, -1e4, -100.0, 100.0, 1e4, 1e30, jnp.inf])


def test_density_and_distribution_are_those_of_the_notes():
    density, cdf = mj.discrete.gumbel_log_density(POINTS), mj.discrete.gumbel_cdf(POINTS)
    assert_close(jnp.exp(density), jnp.exp(-(POINTS + jnp.exp(-POINTS))), 1e-14)
    assert_close(cdf, jnp.exp(-jnp.exp(-POINTS)), 1e-14)
    assert_close(density, scipy.stats.gumbel_r.logpdf(np.asarray(POINTS)), 1e-12)
    assert_close(cdf, scipy.stats.gumbel_r.cdf(np.asarray(POINTS)), 1e-12)


def test_derivatives_are_those_of_the_formulas():
    @jax.jit
    def every(points):
        cdf = mj.discrete.gumbel_cdf
        slopes = jax.grad(mj.discrete.gumbel_log_density), jax.grad(cdf), jax.grad(jax.grad(cdf))
        return [jax.vmap(f)(points) for f in slopes]

    slope, density, second = every(POINTS)
    assert_close(slope, jnp.exp(-POINTS) - 1, 1e-12)
    assert_close(density, jnp.exp(mj.discrete.gumbel_log_density(POINTS)), 1e-14)
    assert_close(second, density * (jnp.exp(-POINTS) - 1), 1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_ends_of_the_line(dtype):
    g = EXTREME.astype(dtype)
    density, cdf = mj.discrete.gumbel_log_density(g), mj.discrete.gumbel_cdf(g)
    assert not jnp.isnan(density).any()
    assert density[0] == density[-1] == -jnp.inf
    assert_close(cdf, jnp.asarray([0, 0, 0, 0, 1, 1, 1, 1], dtype))
    for fn in (mj.discrete.gumbel_log_density, mj.discrete.gumbel_cdf):
        assert jnp.isfinite(jax.vmap(jax.grad(fn))(g)).all()


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
