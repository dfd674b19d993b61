"""Draws of a whole tree of beliefs."""

import jax
import numpy as np

from moment_jax.layers import DenseParams, EncoderBlockParams
from moment_jax.posterior import Factorized, OutputShared, Point, sample_params
from tests.builders import random_block, random_vector

KEY = jax.random.key(0)
draw = jax.jit(sample_params)


def test_sample_params_keeps_the_tree():
    params = random_block(KEY, 4, 6, family=Point)
    shapes = jax.eval_shape(sample_params, params, KEY)
    assert isinstance(shapes, EncoderBlockParams)
    assert shapes.attention.query.kernel.shape == params.attention.query.kernel.shape
    beliefs = {"certain": DenseParams(Point(np.ones((2, 3)))), "other": (np.arange(3), None)}
    drawn = draw(beliefs, KEY)
    assert drawn["certain"].bias is None
    assert drawn["other"][1] is None
    np.testing.assert_array_equal(drawn["certain"].kernel, np.ones((2, 3)))
    np.testing.assert_array_equal(drawn["other"][0], np.arange(3))
    assert sample_params({}, KEY) == {}


def test_sample_params_draws_each_leaf_with_its_own_key():
    """Also where leaves alike in family and shape are drawn together, and others lie between them."""
    keys = jax.random.split(KEY, 3)
    beliefs = [random_vector(k, Factorized, n) for k, n in zip(keys, (2, 3, 2), strict=True)]
    got = draw(beliefs, KEY)

    @jax.jit
    def one_by_one(beliefs):
        keys = jax.random.split(KEY, 3)
        return [belief.sample(key) for belief, key in zip(beliefs, keys, strict=True)]

    for one, wanted in zip(got, one_by_one(beliefs), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-14)
    for one in (Factorized(np.zeros(2), np.ones(2)), OutputShared(np.zeros((1, 2)), np.ones(2))):
        first, second = draw((one, one), KEY)
        assert first.shape == one.shape
        assert not np.any(np.asarray(first) == np.asarray(second))
