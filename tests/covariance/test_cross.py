"""Cov[x, z] in every structure: what it becomes by operations on z is the dense one's projection."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.covariance import Diagonal, Full, Separable
from tests.builders import ALL_STRUCTURES, assert_close, random_cov

T, D = 4, 5
KEYS = jax.random.split(jax.random.key(3), 8)
KERNEL, OTHER = jax.random.normal(KEYS[0], (2, D, D))
GAIN = jax.random.normal(KEYS[1], (1, D))
TOKENS = jax.random.uniform(KEYS[2], (T, T))
HEADS = jax.random.uniform(KEYS[3], (D, T, T))
ROWS, COLUMNS = np.array([1, 0, -1, 3]), np.array([4, -1, 0, 1, 1])
SAME = np.arange(T)
CARRIED = {  # functions of Cov[x, x]
    "itself": lambda c: c,
    "kernel": lambda c: c.map_features(KERNEL),
    "three kernels": lambda c: c.map_features(KERNEL).rescale(GAIN).map_features(OTHER).map_features(
        KERNEL
    ),
    "each": lambda c: c.map_each(jnp.broadcast_to(KERNEL, (T, D, D))),
    "tokens": lambda c: c.map_tokens(TOKENS),
    "heads": lambda c: c.map_heads(jnp.broadcast_to(TOKENS, HEADS.shape)),
    "columns": lambda c: c.take(SAME, COLUMNS),
    "rows": lambda c: c.take(ROWS, np.arange(D)),
    "both sides": lambda c: c.map_features(KERNEL).T.rescale(GAIN).map_features(OTHER).T,
    "a sum": lambda c: c.add(c.map_features(KERNEL)).add(c.map_features(OTHER)),
    "the same rows of both": lambda c: c.map_features(KERNEL).take(ROWS, np.arange(D)).T.take(
        ROWS, np.arange(D)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def entries():
    """The covariance of every entry of x with that of what it became, ours and the dense one."""

    @jax.jit
    def both(cov):
        dense = Full(cov.to_dense()).with_itself()
        return {n: (f(cov.with_itself()).own(), f(dense).own()) for n, f in CARRIED.items()}

    return {s: both(random_cov(KEYS[4], s, (T, D))) for s in ALL_STRUCTURES}


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried_is_the_dense_covariance(structure, name, entries):
    ours, expected = entries[structure][name]
    assert_close(ours, expected)


def test_a_diagonal_forgets_what_other_tokens_tell():
    cov = Diagonal(jnp.ones((T, D))).with_itself()
    assert cov.map_tokens(TOKENS[:2]) is None


def test_a_covariance_beyond_both_variances_is_bounded():
    """So where heads cancel in the pooled sum, whose share in what tokens get is then out of scale."""
    covs = [
        random_cov(key, Separable, (2, 13)) for key in KEYS[:2]
    ]  # no narrower: not corrected then
    cross = covs[0].with_itself()
    found = covs[0].add_branch(covs[1], cross._replace(features=-1e3 * cross.features))
    own, other, both = (jnp.diagonal(cov.tokens) for cov in (*covs, found))
    np.testing.assert_allclose(both, (own**0.5 - other**0.5) ** 2, rtol=1e-6)
