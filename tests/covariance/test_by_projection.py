"""A user's structure, defined by its projection alone, works wherever a covariance does."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import assert_close, random_block, random_cov, random_dense

pytestmark = pytest.mark.slow

KEYS = jax.random.split(jax.random.key(8), 4)
BLOCK = random_block(KEYS[0], 4, 6, 0.3)
X = jax.random.normal(KEYS[1], (4, 4))


def define_pairs() -> type[mj.ByProjection]:
    """Tokens 2i and 2i + 1 are correlated, all others independent."""

    @mj.register_fields
    @dataclasses.dataclass(frozen=True)
    class Pairs(mj.ByProjection):
        cov: jax.Array  # (T, D, T, D), zero between pairs

        num_axes = 4

        @classmethod
        def project(cls, dense):
            pair = jnp.arange(dense.shape[0]) // 2
            return cls(jnp.where((pair[:, None] == pair[None])[:, None, :, None], dense, 0))

        def to_dense(self):
            return self.cov

    return Pairs


Pairs = define_pairs()
TRANSFORMS = {
    "attention": partial(mj.attention, params=BLOCK.attention, num_heads=2),
    "causal": partial(
        mj.attention, params=BLOCK.attention, num_heads=2, mask=jnp.tril(jnp.ones((4, 4), bool))
    ),
    "layer_norm": partial(mj.layer_norm, params=BLOCK.norm1),
    "feed_forward": partial(mj.feed_forward, params=BLOCK.feed_forward, activation=mj.gelu),
}


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_structure_that_loses_nothing_is_full(norm_first: bool):
    """Two tokens, one pair: block, gradient and batch."""
    noise = random_dense(KEYS[2], (2, 4), 0.3)

    def loss(structure, x):
        mean, cov = mj.encoder_block(
            x,
            structure.project(noise),
            BLOCK,
            num_heads=2,
            norm_first=norm_first,
            activation=mj.gelu,
        )
        variance = cov.variance()
        return jnp.sum(mean**2) + jnp.sum(variance), (mean, cov.to_dense(), variance)

    def both(structure):
        return jax.grad(partial(loss, structure), has_aux=True)

    ours = jax.jit(jax.vmap(both(Pairs)))(X.reshape(2, 2, 4))
    full = jax.jit(both(mj.Full))(X[:2])
    for batch, alone in zip(*map(jax.tree.leaves, (ours, full)), strict=True):
        assert_close(batch[0], alone)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_layers_keep_the_structure(name: str):
    """Means depend on the covariance of the input alone, so variances only come near the dense ones."""
    cov = Pairs.project(random_cov(KEYS[2], mj.Full, (4, 4), 0.3).to_dense())

    @jax.jit
    def both(cov):
        mean, ours = TRANSFORMS[name](X, cov)
        full_mean, full = TRANSFORMS[name](X, mj.Full(cov.to_dense()))
        return mean, ours, full_mean, Pairs.project(full.to_dense())

    mean, ours, full_mean, expected = both(cov)
    assert type(ours) is Pairs
    assert np.linalg.eigvalsh(ours.to_dense().reshape(16, 16))[0] > -1e-10
    if name == "layer_norm":  # linear in the covariance, so it is the projection itself
        assert_close(mean, full_mean)
        assert_close(ours.to_dense(), expected.to_dense())
    else:
        assert 0.8 < jnp.sum(ours.variance()) / jnp.sum(expected.variance()) < 1.25


def test_propagate_takes_it():
    """A gated product with a residual: its operands share an input."""
    params = {"gate": BLOCK.attention.query.kernel, "value": BLOCK.attention.key.kernel}

    def fn(params, x):
        return x + jax.nn.silu(x @ params["gate"]) * (x @ params["value"])

    ours, full = (mj.propagate(fn, structure=s)(params, X[:2])[1] for s in (Pairs, mj.Full))
    assert_close(ours.to_dense(), full.to_dense())


def test_modules_take_it():
    model = mj.nn.VisionTransformer(
        image_size=4,
        patch_size=2,
        num_classes=3,
        num_features=4,
        num_heads=2,
        num_blocks=1,
        structure=Pairs,
        rngs=nnx.Rngs(0),
    )
    mean, cov = jax.jit(lambda x: model(x))(jnp.ones((2, 4, 4)))
    assert mean.shape == (2, 3)
    assert jnp.all(jnp.isfinite(cov))


def test_a_class_can_be_defined_again():
    """As when a notebook cell runs twice."""
    assert define_pairs() is not Pairs
