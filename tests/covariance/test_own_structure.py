"""A user's structure, defined by its projection alone, works wherever a covariance does."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from tests.builders import (
    Pairs,
    assert_close,
    define_pairs,
    random_block,
    random_cov,
    random_dense,
    tiny_vision,
)

KEYS = jax.random.split(jax.random.key(8), 4)
BLOCK = random_block(KEYS[0], 4, 6, 0.3)
X = jax.random.normal(KEYS[1], (4, 4))
block = partial(mj.encoder_block, params=BLOCK, num_heads=2, norm_first=True, activation="gelu")


@mj.register_fields
@dataclasses.dataclass(frozen=True)
class Halves(mj.Covariance):
    """Two halves of the features, as of two heads, are uncorrelated."""

    cov: jax.Array
    num_axes = 4

    @classmethod
    def project(cls, dense):
        half = 2 * jnp.arange(dense.shape[1]) // dense.shape[1]
        return cls(jnp.where((half[:, None] == half[None])[None, :, None], dense, 0))

    def to_dense(self):
        return self.cov


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


def test_a_block_keeps_the_structure():
    """Variances come near those of `Full`, for an input that the structure holds."""
    cov = Pairs.project(random_cov(KEYS[2], mj.Full, (4, 4), 0.3).to_dense())

    @jax.jit
    def both(cov):
        causal = jnp.tril(jnp.ones((4, 4), bool))
        return [block(X, given, mask=causal)[1] for given in (cov, mj.Full.of(cov))]

    ours, full = both(cov)
    assert type(ours) is Pairs
    assert np.linalg.eigvalsh(ours.to_dense().reshape(16, 16))[0] > -1e-10
    assert 0.8 < jnp.sum(ours.variance()) / jnp.sum(full.variance()) < 1.25


def test_propagate_and_modules_take_it():
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


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_of_a_user")
def test_a_vision_transformer_takes_it():
    """Taking the noise of two halves as uncorrelated moves each logit's sd by a ninth on average."""
    images = jax.random.normal(KEYS[3], (2, 4, 4))
    model = mj.Bayesian(tiny_vision(), structure=Halves)
    ours, full = (jax.jit(m)(images) for m in (model, model.replace(structure=mj.Full)))
    assert type(ours.cov) is Halves
    assert ours.mean.shape == ours.sd.shape == (2, 3)
    assert 0.8 < jnp.mean(ours.sd / full.sd) < 1.25


def test_a_class_can_be_defined_again():
    """As when a notebook cell runs twice."""
    assert define_pairs() is not Pairs
