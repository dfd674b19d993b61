"""A user's structure, defined by its projection alone, works wherever a covariance does."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from tests.builders import Pairs, assert_close, define_pairs, random_block, random_dense

KEYS = jax.random.split(jax.random.key(8), 4)
BLOCK = random_block(KEYS[0], 4, 6, 0.3)
X = jax.random.normal(KEYS[1], (4, 4))
block = partial(mj.encoder_block, params=BLOCK, num_heads=2, norm_first=True, activation="gelu")


@pytest.mark.slow
def test_a_structure_that_loses_nothing_is_full():
    """Two tokens, one pair: block, gradient and batch."""
    noise = random_dense(KEYS[2], (2, 4), 0.3)

    def loss(structure, x):
        mean, cov = block(x, structure.project(noise))
        variance = cov.variance()
        return jnp.sum(mean**2) + jnp.sum(variance), (mean, cov.to_dense(), variance)

    def both(structure):
        return jax.grad(partial(loss, structure), has_aux=True)

    ours = jax.jit(jax.vmap(both(Pairs)))(X.reshape(2, 2, 4))
    full = jax.jit(both(mj.Full))(X[:2])
    for batch, alone in zip(*map(jax.tree.leaves, (ours, full)), strict=True):
        assert_close(batch[0], alone)


def test_propagate_takes_it():
    """A gated product with a residual: its operands share an input."""
    params = {"gate": BLOCK.attention.query.kernel, "value": BLOCK.attention.key.kernel}

    def fn(params, x):
        return x + jax.nn.silu(x @ params["gate"]) * (x @ params["value"])

    @jax.jit
    def both(params):
        return [
            mj.propagate(fn, structure=s)(params, X[:2])[1].to_dense() for s in (Pairs, mj.Full)
        ]

    assert_close(*both(params))


def test_a_class_can_be_defined_again():
    """As when a notebook cell runs twice."""
    assert define_pairs() is not Pairs
