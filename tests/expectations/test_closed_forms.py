"""What is particular to the closed forms and to the quadrature: tails, float32, exactness."""

import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.expectations import elementwise, gelu, rectified
from tests.expectations.families import FAMILIES, integral


def test_rectified_tails_in_float32():
    t = jnp.array([-40.0, -13.0, -9.0, 9.0, 13.0, 40.0], jnp.float32)
    out = rectified(t, jnp.ones_like(t))
    np.testing.assert_array_less(out.variance[:3], 1e-17)
    np.testing.assert_array_equal(out.variance[3:], 1)
    np.testing.assert_array_equal(out.mean[3:], t[3:])
    np.testing.assert_array_equal(out.gain[jnp.array([0, 5])], jnp.array([0, 1]))
    assert bool(jnp.all(out.variance >= 0))


@pytest.mark.parametrize("fn", [rectified, gelu])
def test_huge_arguments_give_no_nan(fn):
    values = jnp.array([-1e30, -1e10, -1e4, 0.0, 1e4, 1e10, 1e30], jnp.float32)
    m, v = (jnp.ravel(x) for x in jnp.meshgrid(values, jnp.abs(values)))
    for x in fn(m, v):
        assert not bool(jnp.any(jnp.isnan(x)))
    ends = jnp.array([-40.0, 40.0])
    np.testing.assert_allclose(fn(ends, jnp.ones(2)).variance, jnp.array([0.0, 1.0]), atol=1e-15)


def test_negative_rounding_counts_as_zero():
    m = jnp.array([-1.0, 2.0])
    for fn in (rectified, gelu):
        for got, want in zip(fn(m, -1e-18 * jnp.ones(2)), fn(m, jnp.zeros(2)), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("dtype", "limit", "least"), [(jnp.float32, 1e-3, 0.01), (jnp.float64, 1e-11, 0)]
)
def test_relative_error_of_gelu_sd(dtype, limit, least):
    """The documented budget, down to sd 1e-4 |m|, where E[f^2] - E[f]^2 would have no digits."""
    m, v = np.meshgrid(np.linspace(-6, 6, 13), [1e-8, 1e-3, 0.06, 0.065, 2, 10, 100])
    m32, v32 = jnp.asarray(m, dtype), jnp.asarray(v, dtype)
    got = np.sqrt(np.asarray(gelu(m32, v32).variance, float))
    exact = [
        integral(FAMILIES["gelu"], float(a), float(b)).variance
        for a, b in zip(m32.ravel(), v32.ravel(), strict=True)
    ]
    want = np.sqrt(np.reshape(exact, m.shape))
    error = np.abs(got - want) / np.maximum(want, least * np.sqrt(v))
    np.testing.assert_array_less(error, limit)


@pytest.mark.parametrize("degree", range(1, 8))
@pytest.mark.parametrize("variance", [0.03, 0.5])
def test_quadrature_is_exact_for_polynomials(degree, variance):
    """E[x^n] by the recursion E[x^n] = m E[x^(n-1)] + (n - 1) v E[x^(n-2)]."""
    m = 0.7
    moment = [1.0, m]
    for n in range(2, 2 * degree + 1):
        moment.append(m * moment[-1] + (n - 1) * variance * moment[-2])
    out = elementwise(lambda x: x**degree, jnp.array(m), jnp.array(variance), num_nodes=8)
    np.testing.assert_allclose(out.mean, moment[degree], rtol=1e-12)
    np.testing.assert_allclose(out.variance, moment[2 * degree] - moment[degree] ** 2, rtol=1e-10)
    np.testing.assert_allclose(out.gain, degree * moment[degree - 1], rtol=1e-11)


def test_quadrature_errors():
    x = jnp.zeros(3)
    with pytest.raises(ValueError, match="num_nodes >= 8"):
        elementwise(jnp.tanh, x, x, num_nodes=4)
    with pytest.raises(ValueError, match="scalar"):
        elementwise(lambda y: jnp.stack([y, y]), x, x)
