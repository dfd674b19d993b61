"""Attention where it is linear (certain queries and keys), and masks of one row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from moment_jax.covariance import Full
from tests.builders import ALL_STRUCTURES, assert_close, random_cov, random_dense_params

KEYS = jax.random.split(jax.random.key(1), 8)
SHAPE, OUT = (3, 4), 5
MEAN = jax.random.normal(KEYS[0], SHAPE)


@pytest.mark.parametrize("certain", [(), ("output",)])
def test_attention_with_random_values_alone_is_linear(certain):
    """For a certain input `Separable` keeps both Gram matrices, with separate noise in each head.

    All values of a head have one token pattern, which is the structure's own for this family.
    """
    families = dict.fromkeys(("query", "key", *certain), mj.posterior.Point)
    families = {"value": mj.posterior.OutputShared, "output": mj.posterior.Factorized, **families}
    shapes = {"output": (OUT - 1, SHAPE[1])}
    params = mj.AttentionParams(
        *(
            random_dense_params(key, families[name], shapes.get(name, (SHAPE[1], OUT - 1)))
            for key, name in zip(KEYS, ("query", "key", "value", "output"), strict=False)
        )
    )

    @jax.jit
    def run(mean):
        covs = (s.zeros(SHAPE, jnp.float64) for s in (mj.Separable, Full))
        results = (mj.attention(mean, cov, params, num_heads=2) for cov in covs)
        (mean, ours), (expected_mean, textbook) = results
        textbook = textbook.to_dense()
        tokens, features = jnp.einsum("tdsd->ts", textbook), jnp.einsum("tdse->de", textbook)
        return (mean, ours.token_gram(), ours.features), (expected_mean, tokens, features)

    for actual, expected in zip(*run(MEAN), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_one_row_of_a_mask_serves_all_queries(structure):
    params = mj.AttentionParams(
        *(random_dense_params(k, mj.posterior.Factorized, (4, 4)) for k in KEYS[1:5])
    )
    cov, mask = random_cov(KEYS[5], structure, SHAPE), jnp.array([[True, False, True]])

    @jax.jit
    def moments(mask):
        mean, found = mj.attention(MEAN, cov, params, num_heads=2, mask=mask)
        return mean, found.to_dense()

    one, every = moments(mask), moments(jnp.broadcast_to(mask, (3, 3)))
    assert_close(one[0], every[0])
    assert_close(one[1], every[1])
