"""The document's identities beside the textbook's formulas: Eq. 1, 11, 12, 14, 15 and 3.4.2."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moment_jax as mj
from tests.builders import assert_close

brownian = mj.brownian


def sphere_tokens(count=7, features=6, seed=0):
    return np.asarray(
        brownian.to_sphere(np.random.default_rng(seed).normal(size=(count, features)))
    )


def test_attention_is_the_gaussian_kernel_on_the_sphere():
    one = sphere_tokens(1)
    assert_close(brownian.transition_matrix(one), np.ones((1, 1)))
    assert_close(brownian.row_normalize(brownian.gaussian_kernel(one, one)), np.ones((1, 1)))
    x = sphere_tokens(9, 16)
    scores = np.exp(np.asarray(x @ x.T) / 4)
    expected = scores / scores.sum(axis=1, keepdims=True)
    assert_close(brownian.transition_matrix(x), expected)
    kernel = brownian.gaussian_kernel(x, x)
    assert_close(np.asarray(kernel) * np.exp(4.0), scores)  # Eq. 14's constant s
    assert_close(brownian.row_normalize(kernel), expected)
    free = np.random.default_rng(3).normal(size=(9, 16))
    walk = brownian.row_normalize(brownian.gaussian_kernel(free, free))
    assert np.max(np.abs(np.asarray(brownian.transition_matrix(free)) - np.asarray(walk))) > 0.05


def test_gaussian_kernel_as_printed():
    x, y = np.random.default_rng(0).normal(size=(2, 3, 4))
    expected = np.exp(-np.sum((x[:, None] - y[None]) ** 2, axis=-1) / (2 * 0.7**2))
    assert_close(brownian.gaussian_kernel(x, y, bandwidth=0.7), expected)


def test_reversible_with_identity_projections_and_not_with_others():
    x = sphere_tokens()
    transition = brownian.transition_matrix(x)
    law = brownian.stationary(transition)
    kernel = np.asarray(brownian.gaussian_kernel(x, x))
    assert_close(law, kernel.sum(axis=1) / kernel.sum())
    assert brownian.detailed_balance_gap(transition, law) < 1e-12
    query, key = np.random.default_rng(5).normal(size=(2, 6, 6))
    other = jax.nn.softmax(brownian.attention_scores(x, query, key), axis=1)
    assert brownian.detailed_balance_gap(other, brownian.stationary(other)) > 0.05


def test_attention_scores_are_flax_attention():
    layer = nnx.MultiHeadAttention(
        2, 6, qkv_features=8, param_dtype=jnp.float64, decode=False, rngs=nnx.Rngs(0)
    )
    layer.query.bias.set_value(np.random.default_rng(8).normal(size=(2, 4)))
    x = sphere_tokens()
    parts = layer.query.kernel, layer.key.kernel, layer.query.bias, layer.key.bias
    scores = brownian.attention_scores(x, *(part[...] for part in parts))
    query, key = layer.query(x) / 2, layer.key(x)
    assert_close(scores, np.einsum("qhk,shk->hqs", query, key))


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


def test_squared_distances_are_dot_products_on_the_sphere():
    x, y = sphere_tokens(seed=1), sphere_tokens(4, seed=2)
    assert_close(brownian.squared_distances(x, y), 2 * 6 - 2 * x @ y.T)
    distances = np.sum((2 * x[:, None] - y[None, :]) ** 2, axis=-1)
    assert_close(brownian.squared_distances(2 * x, y), distances)
