"""Laws that every elementwise function of a Gaussian obeys; a new one is a line in families.py.

Then what is particular to the closed forms and to the quadrature: tails, float32, exactness.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax import expectations
from moment_jax.expectations import elementwise
from moment_jax.expectations.quadrature import expected, resolving
from tests.expectations.families import FAMILIES, Family, integral

MEANS = (-6.0, -2.5, -0.7, 0.0, 0.4, 1.3, 5.0)
NUM_POINTS = 91


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
        pulled = [pull(type(out)(*(one if i == j else zero for j in range(4)))) for i in range(4)]
        mean_slope = jax.grad(lambda m: jnp.sum(family.moments(m, v).mean))
        return out, slopes, pulled, jax.jvp(mean_slope, (m,), (one,))[1]

    return jax.jit(everything)


def at(family: Family, m, v, dtype=np.float64):
    """The results of `program` at these points; all calls share one compilation."""
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
        if field == "variance" and not family.exact_variance:
            continue
        expected = np.array([getattr(w, field) for w in want]).reshape(m.shape)
        scale = np.maximum(1.0, np.abs(expected))
        np.testing.assert_array_less(np.abs(getattr(got, field) - expected) / scale, 1e-10)


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
    chex.assert_tree_all_finite((slopes, pulled))


def test_second_derivative_of_mean_is_curvature(family):
    out, _, _, curvature = at(family, 0.6, 0.4)
    np.testing.assert_allclose(curvature, np.sqrt(2.0) * out.second / 0.4, rtol=1e-9)


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


closed_forms = pytest.mark.parametrize("name", ["rectified", "gelu"])


def test_rectified_tails_in_float32():
    t = np.array([-40.0, -13.0, -9.0, 9.0, 13.0, 40.0], np.float32)
    out = at(FAMILIES["rectified"], t, 1.0, np.float32)[0]
    np.testing.assert_array_less(out.variance[:3], 1e-17)
    np.testing.assert_array_equal(out.variance[3:], 1)
    np.testing.assert_array_equal(out.mean[3:], t[3:])
    np.testing.assert_array_equal(out.gain[[0, 5]], [0, 1])
    assert np.all(out.variance >= 0)


@closed_forms
def test_huge_arguments_give_no_nan(name):
    values = np.array([-1e30, -1e10, -1e4, 0.0, 1e4, 1e10, 1e30])
    out = at(FAMILIES[name], *np.meshgrid(values, np.abs(values)), np.float32)[0]
    assert not any(np.any(np.isnan(x)) for x in out)
    ends = at(FAMILIES[name], [-40.0, 40.0], 1.0)[0]
    np.testing.assert_allclose(ends.variance, [0.0, 1.0], atol=1e-15)


@closed_forms
def test_negative_rounding_counts_as_zero(name):
    below, zero = (at(FAMILIES[name], [-1.0, 2.0], v)[0] for v in (-1e-18, 0.0))
    for got, want in zip(below, zero, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sd_of_gelu(dtype):
    """The documented budget, in sd of x: three terms of a sum of squares, so never too large."""
    budget = dict.fromkeys((1e-8, 1e-3, 0.1), 1e-4) | {0.5: 0.0044, 1.0: 0.0125}
    budget |= dict.fromkeys((2.0, 10.0, 100.0), 0.0215)
    m, v = np.meshgrid(np.linspace(-5, 5, 11), [*budget])
    got = np.sqrt(at(FAMILIES["gelu"], m, v, dtype)[0].variance.astype(float))
    points = zip(m.flat, v.flat, strict=True)
    exact = [integral(FAMILIES["gelu"], *point).variance for point in points]
    missing = (np.sqrt(np.reshape(exact, m.shape)) - got) / np.sqrt(v)
    assert (missing > -1e-4).all()
    np.testing.assert_array_less(missing.max(axis=1), [*budget.values()])


def test_steps():
    """Mean and variance are integrals; gain and second are slopes of the mean (Stein, Price)."""
    pieces = {"kinks": [0.5], "slopes": [2.0, 0.3], "value": 0.7}
    pieces["steps"] = [(2.0, 1.0), (-1.0, 0.5)]
    family = Family(
        functools.partial(expectations.piecewise_linear, **pieces),
        lambda x: 0.7 + np.where(x < 0.5, 2.0, 0.3) * (x - 0.5) + 0.5 * (x > -1) + (x > 2),
        lambda x: np.where(x < 0.5, 2.0, 0.3),
        (1e-4, 0.06, 1.0, 30.0),
        kinks=(-1.0, 0.5, 2.0),
    )
    m, v = (x.ravel() for x in grid(family))
    out = family.moments(m, v)
    by_mean, by_variance = jax.grad(lambda *at: family.moments(*at).mean.sum(), (0, 1))(m, v)
    want = [integral(family, *point) for point in zip(m, v, strict=True)]
    np.testing.assert_allclose(out.mean, [w.mean for w in want], atol=1e-10)
    np.testing.assert_allclose(out.variance, [w.variance for w in want], rtol=1e-9)
    np.testing.assert_allclose(out.gain, by_mean, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(out.second, np.sqrt(2) * v * by_variance, rtol=1e-9, atol=1e-12)


@jax.jit
def power_moments(degree, mean, variance):
    return elementwise(lambda x: x**degree, mean, variance, num_nodes=8)


@pytest.mark.parametrize("degree", range(1, 8))
@pytest.mark.parametrize("variance", [0.03, 0.5])
def test_quadrature_is_exact_for_polynomials(degree, variance):
    """E[x^n] by the recursion E[x^n] = m E[x^(n-1)] + (n - 1) v E[x^(n-2)]."""
    m = 0.7
    moment = [1.0, m]
    for n in range(2, 2 * degree + 1):
        moment.append(m * moment[-1] + (n - 1) * variance * moment[-2])
    out = power_moments(float(degree), m, variance)
    np.testing.assert_allclose(out.mean, moment[degree], rtol=1e-12)
    np.testing.assert_allclose(out.variance, moment[2 * degree] - moment[degree] ** 2, rtol=1e-10)
    np.testing.assert_allclose(out.gain, degree * moment[degree - 1], rtol=1e-11)


def test_quadrature_errors():
    x = jnp.zeros(3)
    with pytest.raises(ValueError, match="num_nodes >= 8"):
        elementwise(jnp.tanh, x, x, num_nodes=4)
    with pytest.raises(ValueError, match="scalar"):
        elementwise(lambda y: jnp.stack([y, y]), x, x)


def test_expected_value_and_its_derivatives_by_prices_theorem():
    mean, variance = jnp.array([0.4, -1.0, 0.3]), jnp.array([0.02, 0.7, 0.0])

    def total(mean, variance):
        return jnp.sum(expected(jnp.sin, mean, variance))

    @jax.jit
    def derivatives(mean, variance):
        by_variance = jax.grad(total, 1)
        second = jax.grad(lambda variance: jnp.sum(by_variance(mean, variance)))(variance)
        return by_variance(mean, variance), jax.grad(total)(mean, variance), second

    sine, cosine = (jnp.exp(-variance / 2) * fn(mean) for fn in (jnp.sin, jnp.cos))
    found = expected(jnp.sin, mean, variance), *derivatives(mean, variance)
    chex.assert_trees_all_close(found, (sine, -sine / 2, cosine, sine / 4), rtol=1e-9)


NAMES = "tanh", "silu", "gelu", "sigmoid", "softplus", "mish", "elu"
ORDINARY = [getattr(jax.nn, name) for name in NAMES]


def test_ordinary_activations_keep_16_nodes():
    assert all(resolving(fn, jnp.float32, bends=True) == (16, 2.0) for fn in ORDINARY)


@pytest.mark.parametrize(
    ("fn", "bends"),
    [
        (lambda x: jnp.cos(30 * x), False),
        (lambda x: jnp.exp(-jnp.square((x - 3) / 0.05)), False),
        (lambda x: x + jnp.sin(16 * x) ** 2 / 16, False),
        (lambda x: jax.nn.relu(jnp.sin(30 * x)), True),
    ],
    ids=["waves", "bell", "snake", "bent waves"],
)
def test_narrow_functions_have_as_many_nodes_as_they_need(fn, bends):
    """Against sums over a fine grid: mean and sd to 2 % of the sd."""
    num_nodes, _ = resolving(fn, jnp.float64, bends=bends)
    m, v = (
        jnp.ravel(x) for x in jnp.meshgrid(jnp.array([0.0, 2.95]), jnp.array([0.05, 0.3, 1.5]) ** 2)
    )
    found = jax.jit(lambda m, v: elementwise(fn, m, v, num_nodes=num_nodes, bends=bends))(m, v)
    z = jnp.linspace(-8, 8, 40_001)
    density = jnp.exp(-(z**2) / 2) / jnp.sum(jnp.exp(-(z**2) / 2))
    values = fn(m[:, None] + jnp.sqrt(v)[:, None] * z[None])
    mean = values @ density
    sd = jnp.sqrt((values - mean[:, None]) ** 2 @ density)
    assert jnp.all(jnp.abs(found.mean - mean) < 0.02 * sd + 1e-9)
    assert jnp.allclose(jnp.sqrt(found.variance), sd, rtol=0.02, atol=1e-9)


def test_what_no_number_of_nodes_resolves_is_said():
    num_nodes, width = resolving(lambda x: jnp.exp(-jnp.square((x - 3) / 0.003)), jnp.float32)
    assert num_nodes == 512
    assert 0 < width < 1
