"""Laws that every elementwise function of a Gaussian obeys; a new one is a line in families.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

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
    for m, v in ((-0.7, 0.5), (0.4, 0.06), (1.3, family.variances[-1])):
        got = family.moments(jnp.asarray(m), jnp.asarray(v))
        y = family.fn(np.asarray(m + np.sqrt(v) * z))
        pairs = 0.5 * (y[:num] + y[num:])
        assert abs(got.mean - pairs.mean()) < 5 * pairs.std() / np.sqrt(num) + 1e-12
        squares = 0.5 * ((y[:num] - y.mean()) ** 2 + (y[num:] - y.mean()) ** 2)
        assert abs(got.variance - squares.mean()) < 5 * squares.std() / np.sqrt(num) + 1e-12


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_parseval(family, dtype):
    m, v = grid(family, dtype)
    out = family.moments(m, v)
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


@pytest.mark.parametrize("field", FIELDS)
def test_gradients_match_finite_differences(family, field):
    m = jnp.array([-1.6, -0.3, 0.8, 2.1])
    for v in (0.03, 0.2, 1.0):
        check_grads(
            lambda a, b: getattr(family.moments(a, b), field),
            (m, jnp.full_like(m, v)),
            order=2,
            eps=1e-4,
        )


def test_gradients_at_zero_variance(family):
    m = jnp.array([-2.0, -0.3, 0.4, 1.5])
    zero = jnp.zeros_like(m)
    for field in FIELDS:

        def total(a, b, field=field):
            return getattr(family.moments(a, b), field).sum()

        by_mean, by_variance = jax.grad(total, (0, 1))(m, zero)
        step = 1e-5
        forward = (
            4 * getattr(family.moments(m, zero + step), field)
            - getattr(family.moments(m, zero + 2 * step), field)
            - 3 * getattr(family.moments(m, zero), field)
        ) / (2 * step)
        np.testing.assert_allclose(by_variance, forward, atol=1e-6)
        central = getattr(family.moments(m + step, zero), field) - getattr(
            family.moments(m - step, zero), field
        )
        np.testing.assert_allclose(by_mean, central / (2 * step), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_derivatives_are_finite(family, dtype):
    m = jnp.array([-40.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 40.0], dtype)
    for v in (0.0, 1e-30, 1e-12, 1e-4, 1.0):
        for field in FIELDS:

            def total(a, b, field=field):
                return getattr(family.moments(a, b), field).sum()

            grads = jax.grad(total, (0, 1))(m, jnp.full_like(m, v))
            assert all(bool(jnp.all(jnp.isfinite(g))) for g in grads), (v, field)


def test_hessian_of_mean_is_curvature(family):
    m, v = jnp.asarray(0.6), jnp.asarray(0.4)
    hessian = jax.hessian(lambda a: family.moments(a, v).mean)(m)
    curvature = jnp.sqrt(2.0) * family.moments(m, v).second / v
    np.testing.assert_allclose(hessian, curvature, rtol=1e-9)


def test_jit_and_vmap(family):
    m, v = grid(family)
    plain = family.moments(m, v)
    jitted = jax.jit(family.moments)(m, v)
    mapped = jax.vmap(family.moments)(m, v)
    looped = [family.moments(a, b) for a, b in zip(m, v, strict=True)]
    for i, x in enumerate(plain):
        np.testing.assert_allclose(jitted[i], x, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(mapped[i], x, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(np.stack([y[i] for y in looped]), x, rtol=1e-12, atol=1e-14)


def test_errors(family):
    with pytest.raises(ValueError, match=r"variance\.shape == mean\.shape"):
        family.moments(jnp.zeros(3), jnp.zeros(4))
    with pytest.raises(TypeError, match="floating"):
        family.moments(jnp.zeros(3, int), jnp.zeros(3, int))
