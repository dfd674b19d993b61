"""Draws of a whole tree of beliefs."""

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.layers import DenseParams, EncoderBlockParams
from moment_jax.posterior import Factorized, Point, sample_params
from tests.reference.examples import Examples

KEY = jax.random.key(0)


def test_sample_params_keeps_the_tree():
    params = Examples(30).block(Point)
    draw = jax.eval_shape(sample_params, params, KEY)
    assert isinstance(draw, EncoderBlockParams)
    assert draw.attention.query.kernel.shape == params.attention.query.kernel.shape
    beliefs = {"certain": DenseParams(Point(jnp.ones((2, 3)))), "other": (jnp.arange(3), None)}
    drawn = sample_params(beliefs, KEY)
    assert drawn["certain"].bias is None
    assert drawn["other"][1] is None
    np.testing.assert_array_equal(drawn["certain"].kernel, np.ones((2, 3)))
    np.testing.assert_array_equal(drawn["other"][0], np.arange(3))
    assert sample_params({}, KEY) == {}


def test_sample_params_draws_each_leaf_with_its_own_key():
    """Also where leaves alike in family and shape are drawn together, and others lie between them."""
    make = Examples(31)
    beliefs = [make.belief(Factorized, size) for size in (2, 3, 2)]
    keys = jax.random.split(KEY, 3)
    got = sample_params(beliefs, KEY)
    for belief, key, draw in zip(beliefs, keys, got, strict=True):
        np.testing.assert_allclose(draw, belief.sample(key), rtol=1e-14)


def test_sample_params_draws_leaves_independently():
    belief = Factorized(jnp.zeros(2), jnp.ones(2))
    first, second = sample_params((belief, belief), KEY)
    assert not np.any(first == second)
    again, _ = sample_params((belief, belief), KEY)
    np.testing.assert_array_equal(first, again)
