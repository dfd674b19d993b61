"""Quotients and roots that stay finite, and their derivatives with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.covariance.numerics import safe_divide, safe_sqrt


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
