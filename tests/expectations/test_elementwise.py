"""Laws that every elementwise function of a Gaussian obeys; a new one is a line in families.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moment_jax.expectations import ElementwiseMoments
from tests.expectations.families import FAMILIES, Family, integral

MEANS = (-6.0, -2.5, -0.7, 0.0, 0.4, 1.3, 5.0)
FIELDS = ("mean", "variance", "gain", "second")


@pytest.fixture(params=FAMILIES, ids=str)
def family(request):
    return FAMILIES[request.param]


def grid(family: Family, dtype=jnp.float64):
    m, v = np.meshgrid(MEANS, family.variances, indexing="ij")
    return jnp.asarray(m, dtype), jnp.asarray(v, dtype)


def test_equals_integral(family):
    m, v = grid(family)
    got = jax.jit(family.moments)(m, v)
    want = [
        integral(family, a, b) for a, b in zip(m.ravel().tolist(), v.ravel().tolist(), strict=True)
    ]
    for field in FIELDS:
        expected = np.array([getattr(w, field) for w in want]).reshape(m.shape)
        scale = np.maximum(1.0, np.abs(expected))
        np.testing.assert_array_less(np.abs(getattr(got, field) - expected) / scale, 1e-10)


def test_equals_monte_carlo(family):
    num = 200_000
    z = jax.random.normal(jax.random.key(0), (num,))
    z = jnp.concatenate([z, -z])
    moments = jax.jit(family.moments)
    for m, v in ((-0.7, 0.5), (0.4, 0.06), (1.3, family.variances[-1])):
        got = moments(jnp.asarray(m), jnp.asarray(v))
        y = family.fn(np.asarray(m + np.sqrt(v) * z))
        pairs = 0.5 * (y[:num] + y[num:])
        assert abs(got.mean - pairs.mean()) < 5 * pairs.std() / np.sqrt(num) + 1e-12
        squares = 0.5 * ((y[:num] - y.mean()) ** 2 + (y[num:] - y.mean()) ** 2)
        assert abs(got.variance - squares.mean()) < 5 * squares.std() / np.sqrt(num) + 1e-12


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_parseval(family, dtype):
    m, v = grid(family, dtype)
    out = jax.jit(family.moments)(m, v)
    held = out.gain**2 * v + out.second**2
    rounding = 8 * jnp.finfo(dtype).eps
    assert bool(jnp.all(held <= out.variance * (1 + rounding) + rounding**2))
    assert bool(jnp.all(out.variance >= 0))
    assert all(x.dtype == dtype for x in out)


def test_zero_variance_is_the_function(family):
    m = jnp.asarray(MEANS)
    out = family.moments(m, jnp.zeros_like(m))
    np.testing.assert_allclose(out.mean, family.fn(np.asarray(m)), atol=1e-15)
    np.testing.assert_array_equal(out.variance, 0)
    np.testing.assert_array_equal(out.second, 0)
    away = m != 0
    slopes = family.slope(np.asarray(m))
    np.testing.assert_allclose(out.gain[away], slopes[away], atol=1e-14)


def test_gradients_match_finite_differences(family):
    m, v = (jnp.ravel(x) for x in jnp.meshgrid(jnp.array([-1.6, 0.8]), jnp.array([0.03, 0.2, 1.0])))
    check_grads(jax.jit(family.moments), (m, v), order=1, eps=1e-4)


def test_gradients_at_zero_variance(family):
    m = jnp.array([-2.0, -0.3, 0.4, 1.5])
    zero, one, step = jnp.zeros_like(m), jnp.ones_like(m), 1e-5
    moments = jax.jit(family.moments)
    derivative = jax.jit(lambda *tangents: jax.jvp(family.moments, (m, zero), tangents)[1])
    at = [moments(m, k * step * one) for k in (0, 1, 2)]
    forward = [(4 * b - c - 3 * a) / (2 * step) for a, b, c in zip(*at, strict=True)]
    above, below = moments(m + step, zero), moments(m - step, zero)
    central = [(a - b) / (2 * step) for a, b in zip(above, below, strict=True)]
    for got, want in ((derivative(one, zero), central), (derivative(zero, one), forward)):
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_derivatives_are_finite(family, dtype):
    means = jnp.array([-40.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 40.0], dtype)
    variances = jnp.array([0.0, 1e-30, 1e-12, 1e-4, 1.0], dtype)
    m, v = (jnp.ravel(x) for x in jnp.meshgrid(means, variances))
    _, pull = jax.vjp(jax.jit(family.moments), m, v)
    zero = jnp.zeros_like(m)
    for i in range(len(FIELDS)):
        cotangents = [jnp.ones_like(m) if i == j else zero for j in range(len(FIELDS))]
        grads = pull(ElementwiseMoments(*cotangents))
        assert all(bool(jnp.all(jnp.isfinite(g))) for g in grads), FIELDS[i]


def test_hessian_of_mean_is_curvature(family):
    m, v = jnp.asarray(0.6), jnp.asarray(0.4)
    hessian = jax.jit(jax.hessian(lambda a: family.moments(a, v).mean))(m)
    curvature = jnp.sqrt(2.0) * family.moments(m, v).second / v
    np.testing.assert_allclose(hessian, curvature, rtol=1e-9)


def test_jit_and_vmap(family):
    m, v = grid(family)
    plain = family.moments(m, v)
    jitted = jax.jit(family.moments)(m, v)
    mapped = jax.vmap(family.moments)(m, v)
    one_by_one = jax.jit(family.moments)
    looped = [one_by_one(a, b) for a, b in zip(m, v, strict=True)]
    for i, x in enumerate(plain):
        np.testing.assert_allclose(jitted[i], x, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(mapped[i], x, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(np.stack([y[i] for y in looped]), x, rtol=1e-12, atol=1e-14)


def test_errors(family):
    with pytest.raises(ValueError, match=r"variance\.shape == mean\.shape"):
        family.moments(jnp.zeros(3), jnp.zeros(4))
    with pytest.raises(TypeError, match="floating"):
        family.moments(jnp.zeros(3, int), jnp.zeros(3, int))


def test_half_precision_is_computed_in_single(family):
    m, v = (x.astype(jnp.float16) for x in grid(family))
    got = jax.jit(family.moments)(m, v)
    want = jax.jit(family.moments)(m.astype(jnp.float32), v.astype(jnp.float32))
    for half, single in zip(got, want, strict=True):
        assert half.dtype == jnp.float16
        assert jnp.array_equal(half, single.astype(jnp.float16))
