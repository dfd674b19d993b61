"""LayerNorm's sphere beside the textbook's formulas: Eq. 11 and 12."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.brownian.chains import sphere_tokens
from tests.builders import assert_close

brownian = mj.brownian


def test_to_sphere_is_layer_norm():
    x = np.random.default_rng(1).normal(size=(2, 5, 8))
    norm = nnx.LayerNorm(8, epsilon=0.1, use_scale=False, use_bias=False, use_fast_variance=False,
                         param_dtype=x.dtype, rngs=nnx.Rngs(0))  # fmt: skip
    assert_close(brownian.to_sphere(x, epsilon=0.1), norm(x))
    on_sphere = np.asarray(brownian.to_sphere(x))
    assert_close(np.linalg.norm(on_sphere, axis=-1), np.full((2, 5), 8**0.5))
    assert_close(np.sum(on_sphere, axis=-1), np.zeros((2, 5)))
    gradient = jax.jit(jax.grad(lambda y: jnp.sum(brownian.to_sphere(y) ** 3)))(np.ones((2, 4)))
    assert np.isfinite(gradient).all()


def test_dot_products_are_distances_on_the_sphere_alone():
    x, y = sphere_tokens(seed=1), sphere_tokens(4, seed=2)
    assert_close(brownian.sphere_dot(x, y), x @ y.T)
    assert np.max(np.abs(brownian.sphere_dot(2 * x, y) - 2 * x @ y.T)) > 1
    distances = np.sum((x[:, None] - y[None, :]) ** 2, axis=-1)
    assert_close(brownian.squared_distances(x, y), distances)


def test_the_gap_to_the_sphere():
    sphere_gap = jax.jit(brownian.sphere_gap)
    on_sphere = sphere_gap(sphere_tokens(5, 8))
    assert max(map(float, (on_sphere.dot_error, on_sphere.offset, on_sphere.radius_spread))) < 1e-10
    tokens = 1.5 * sphere_tokens(5, 8) + 0.3
    gap = sphere_gap(tokens)
    assert_close(gap.radius, np.sqrt(np.mean(tokens**2)))
    assert_close(gap.offset, 0.3 / gap.radius)
    errors = np.asarray(brownian.sphere_dot(tokens, tokens) - tokens @ tokens.T)[
        ~np.eye(5, dtype=bool)
    ]
    assert_close(gap.dot_error, np.sqrt(np.mean(errors**2)) / 8)
    assert np.isfinite(sphere_gap(tokens[:1]).dot_error)


def test_bad_input():
    with pytest.raises(ValueError, match="D >= 2"):
        brownian.to_sphere(jnp.ones((2, 1)))
    with pytest.raises(ValueError, match="tokens"):
        brownian.sphere_gap(jnp.ones(3))
