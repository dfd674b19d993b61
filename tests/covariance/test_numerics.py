"""Safe quotients and roots stay finite, and so do their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moment_jax.covariance.numerics import correlation_of, gram, safe_divide, safe_sqrt


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("x", [0.0, 1.0])
def test_values_and_gradients_are_finite_at_any_size(dtype, x):
    exponents = np.arange(-320, 30, 2)
    sizes = jnp.asarray(np.concatenate([[0.0], 10.0**exponents]), dtype)
    for y in (sizes, -sizes):
        numerator = jnp.asarray(x, dtype) * y  # a quotient of x at every size
        quotient, pull = jax.vjp(safe_divide, numerator, y)
        assert jnp.isfinite(quotient).all()
        assert all(jnp.isfinite(slope).all() for slope in pull(jnp.ones_like(y) * jnp.sign(y)))
    root, pull = jax.vjp(safe_sqrt, sizes)
    assert jnp.isfinite(root).all()
    assert jnp.isfinite(pull(jnp.ones_like(sizes))[0]).all()
    assert safe_divide(jnp.asarray(2.0, dtype), jnp.asarray(1e-18, dtype)) == pytest.approx(2e18)


def test_nan_stays_nan():
    """A standard deviation or a correlation of 0 instead would look like certainty."""
    bad, one = jnp.asarray([jnp.nan, 1.0]), jnp.ones(2)
    for compiled in (lambda function: function, jax.jit):
        for results in (
            compiled(safe_sqrt)(bad),
            compiled(safe_divide)(bad, one),
            compiled(safe_divide)(one, bad),
            compiled(correlation_of)(jnp.diag(bad) + 0.5).diagonal(offset=1),
        ):
            assert jnp.isnan(results[0])
            assert not jnp.isnan(results[1:]).any()


def test_derivatives_to_second_order():
    x, y = jnp.asarray([0.0, 0.3, 2.0]), jnp.asarray([0.0, 0.7, -3.0])
    check_grads(safe_sqrt, (x[1:],), order=2)
    check_grads(safe_divide, (x[1:], y[1:]), order=2)
    for order in (jax.grad, lambda f: jax.grad(jax.grad(f))):
        assert order(safe_sqrt)(x[0]) == 0
        assert order(lambda a: safe_divide(a, y[0]))(x[0]) == 0
        assert order(lambda a: safe_divide(x[0], a))(y[0]) == 0


METRICS = {
    "none": lambda _: None,
    "diagonal": lambda root: root[0],
    "matrix": lambda root: root @ root.T,
}


@pytest.mark.parametrize("metric_of", METRICS.values(), ids=METRICS)
def test_a_gram_matrix_has_the_derivatives_of_its_products(metric_of):
    keys = jax.random.split(jax.random.key(3), 5)
    rows, change = (jax.random.normal(key, (4, 3)) for key in keys[:2])
    root, other = (jax.random.normal(key, (3, 3)) for key in keys[2:4])
    weights = jax.random.normal(keys[4], (4, 4))  # not symmetric

    def plain(rows, root):
        metric = metric_of(root)
        if metric is None:
            return rows @ rows.T
        return (rows * metric[None] if metric.ndim == 1 else rows @ metric) @ rows.T

    def ours(rows, root):
        return gram(rows, metric_of(root))

    def derivatives(fn):
        def total(rows, root):
            return jnp.sum(weights * jnp.sin(fn(rows, root)))

        slopes = jax.grad(total, (0, 1))
        return [
            fn(rows, root),
            jax.jvp(fn, (rows, root), (change, other))[1],
            slopes(rows, root),
            jax.jvp(slopes, (rows, root), (change, other))[1],
            jax.grad(total)(rows, root),  # the metric is constant
            jax.grad(total, 1)(rows, root),  # the rows are
            jax.vmap(slopes, (None, 0))(rows, jnp.stack([root, other])),
        ]

    both = jax.jit(lambda: (derivatives(ours), derivatives(plain)))()
    for found, expected in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
