"""Laws that every elementwise function of a Gaussian obeys; a new one is a line in families.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.expectations.families import FAMILIES, Family, integral

MEANS = (-6.0, -2.5, -0.7, 0.0, 0.4, 1.3, 5.0)
NUM_POINTS = 70


@pytest.fixture(params=FAMILIES, ids=str)
def family(request):
    return FAMILIES[request.param]


@functools.cache
def program(family: Family):
    """At each point: moments, slopes in mean and variance, the same in reverse mode, E[f]''."""

    def everything(m, v):
        out, forward = jax.linearize(family.moments, m, v)
        one, zero = jnp.ones_like(m), jnp.zeros_like(m)
        slopes = forward(one, zero), forward(zero, one)
        pull = jax.linear_transpose(forward, m, v)
        field = type(out)
        pulled = [pull(field(*jnp.where(jnp.arange(4) == i, 1.0, 0.0).astype(m.dtype)[:, None]
                             * one[None])) for i in range(4)]  # fmt: skip
        mean_slope = jax.grad(lambda m: jnp.sum(family.moments(m, v).mean))
        return out, slopes, pulled, jax.jvp(mean_slope, (m,), (one,))[1]

    return jax.jit(everything)


def at(family: Family, m, v, dtype=np.float64):
    """What `program` says of these points; all sets of points share one compilation."""
    m, v = np.broadcast_arrays(np.asarray(m, dtype), np.asarray(v, dtype))
    padding = (0, NUM_POINTS - m.size)
    given = [np.pad(x.ravel(), padding, constant_values=1) for x in (m, v)]
    return jax.tree.map(lambda x: np.asarray(x)[: m.size].reshape(m.shape), program(family)(*given))


def grid(family: Family):
    return np.meshgrid(MEANS, family.variances, indexing="ij")


def test_equals_integral(family):
    m, v = grid(family)
    got = at(family, m, v)[0]
    want = [integral(family, *point) for point in zip(m.flat, v.flat, strict=True)]
    for field in got._fields:
        expected = np.array([getattr(w, field) for w in want]).reshape(m.shape)
        scale = np.maximum(1.0, np.abs(expected))
        np.testing.assert_array_less(np.abs(getattr(got, field) - expected) / scale, 1e-10)


def test_equals_monte_carlo(family):
    num = 200_000
    z = np.random.default_rng(0).standard_normal(num)
    for m, v in ((-0.7, 0.5), (0.4, 0.06), (1.3, family.variances[-1])):
        got = at(family, m, v)[0]
        halves = [family.fn(m + sign * np.sqrt(v) * z) for sign in (1, -1)]
        mean = np.mean(halves)
        pairs = 0.5 * (halves[0] + halves[1])
        assert abs(got.mean - mean) < 5 * pairs.std() / np.sqrt(num) + 1e-12
        squares = 0.5 * ((halves[0] - mean) ** 2 + (halves[1] - mean) ** 2)
        assert abs(got.variance - squares.mean()) < 5 * squares.std() / np.sqrt(num) + 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parseval(family, dtype):
    m, v = grid(family)
    out = at(family, m, v, dtype)[0]
    held = out.gain**2 * v.astype(dtype) + out.second**2
    rounding = 8 * np.finfo(dtype).eps
    assert np.all(held <= out.variance * (1 + rounding) + rounding**2)
    assert np.all(out.variance >= 0)
    assert all(x.dtype == dtype for x in out)


def test_zero_variance_is_the_function(family):
    m = np.asarray(MEANS)
    out = at(family, m, 0.0)[0]
    np.testing.assert_allclose(out.mean, family.fn(m), atol=1e-15)
    np.testing.assert_array_equal(out.variance, 0)
    np.testing.assert_array_equal(out.second, 0)
    away = m != 0
    np.testing.assert_allclose(out.gain[away], family.slope(m)[away], atol=1e-14)


def test_derivatives_match_finite_differences(family):
    m, v = np.meshgrid([-1.6, 0.8], [0.03, 0.2, 1.0])
    step = 1e-4
    _, slopes, pulled, _ = at(family, m, v)
    for i, (dm, dv) in enumerate(((step, 0), (0, step))):
        above, below = at(family, m + dm, v + dv)[0], at(family, m - dm, v - dv)[0]
        for field, (a, b) in enumerate(zip(above, below, strict=True)):
            np.testing.assert_allclose(slopes[i][field], (a - b) / (2 * step), atol=1e-5, rtol=1e-5)
            np.testing.assert_allclose(pulled[field][i], slopes[i][field], atol=1e-12)


def test_derivatives_at_zero_variance(family):
    m, step = np.array([-2.0, -0.3, 0.4, 1.5]), 1e-5
    here = [at(family, m, k * step)[0] for k in (0, 1, 2)]
    forward = [(4 * b - c - 3 * a) / (2 * step) for a, b, c in zip(*here, strict=True)]
    above, below = at(family, m + step, 0.0)[0], at(family, m - step, 0.0)[0]
    central = [(a - b) / (2 * step) for a, b in zip(above, below, strict=True)]
    for got, want in zip(at(family, m, 0.0)[1], (central, forward), strict=True):
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_derivatives_are_finite(family, dtype):
    points = np.meshgrid([-40.0, -1, -1e-3, 0, 1e-3, 1, 40], [0.0, 1e-30, 1e-12, 1e-4, 1])
    _, slopes, pulled, _ = at(family, *points, dtype)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((slopes, pulled)))


def test_second_derivative_of_mean_is_curvature(family):
    out, _, _, curvature = at(family, 0.6, 0.4)
    np.testing.assert_allclose(curvature, np.sqrt(2.0) * out.second / 0.4, rtol=1e-9)


def test_jit_and_vmap(family):
    m, v = np.array([-0.7, 0.4, 1.3]), np.array([0.01, 0.5, 1.0])
    mapped = jax.jit(jax.vmap(family.moments))(m, v)
    for plain, one, jitted in zip(family.moments(m, v), mapped, at(family, m, v)[0], strict=True):
        np.testing.assert_allclose(jitted, plain, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(one, plain, rtol=1e-12, atol=1e-14)


def test_errors(family):
    with pytest.raises(ValueError, match=r"variance\.shape == mean\.shape"):
        family.moments(jnp.zeros(3), jnp.zeros(4))
    with pytest.raises(TypeError, match="floating"):
        family.moments(jnp.zeros(3, int), jnp.zeros(3, int))


def test_half_precision_is_computed_in_single(family):
    m, v = (x.astype(np.float16) for x in grid(family))
    got = jax.jit(family.moments)(m, v)
    want = at(family, m, v, np.float32)[0]
    for half, single in zip(got, want, strict=True):
        assert half.dtype == jnp.float16
        np.testing.assert_array_equal(half, single.astype(np.float16))
