"""What holds for every structure whatever the numbers: jit, vmap, padding, masks, order of limits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.covariance import Covariance
from tests.builders import (
    ALL_STRUCTURES,
    assert_close,
    random_block,
    random_cov,
    random_dense,
    random_vector,
    rank_one,
)

pytestmark = pytest.mark.slow

KEYS = jax.random.split(jax.random.key(2), 8)
SHAPE, HEADS = (4, 6), 2
BLOCK = random_block(KEYS[0], SHAPE[1], 8, 0.3)
MEAN = jax.random.normal(KEYS[1], SHAPE)
NORM = mj.NormParams(
    random_vector(KEYS[2], mj.posterior.Factorized, SHAPE[1], 0.3, 1.0),
    random_vector(KEYS[3], mj.posterior.Factorized, SHAPE[1], 0.3),
)

MEMORY = jax.random.normal(KEYS[2], (5, 6))
MEMORY_NOISE = random_dense(KEYS[3], (5, 6), 0.5)


def cross_attention(mean, cov):
    memory_cov = rank_one(type(cov).project(MEMORY_NOISE))
    return mj.cross_attention(mean, cov, MEMORY, memory_cov, BLOCK.attention, num_heads=HEADS)


TRANSFORMS = {
    "dense": lambda m, c: mj.dense(m, c, BLOCK.attention.query),
    "softmax": mj.softmax,
    "layer_norm": lambda m, c: mj.layer_norm(m, c, NORM),
    "relu": mj.relu,
    "gelu": mj.gelu,
    "tanh": lambda m, c: mj.activation(m, c, jnp.tanh),
    "attention": lambda m, c: mj.attention(m, c, BLOCK.attention, num_heads=HEADS),
    "cross_attention": cross_attention,
    "feed_forward": lambda m, c: mj.feed_forward(m, c, BLOCK.feed_forward, activation=mj.relu),
    "post_norm": lambda m, c: mj.encoder_block(m, c, BLOCK, num_heads=HEADS),
    "pre_norm": lambda m, c: mj.encoder_block(m, c, BLOCK, num_heads=HEADS, norm_first=True),
    "mean_pool": mj.mean_pool,
}


def psd_batch(key, structure: type[Covariance], count: int) -> Covariance:
    """Random members, large and small, of full and of low rank."""
    scales = 10 ** jax.random.uniform(key, (count,), minval=-2, maxval=0.3)

    def member(key, scale):
        factor = jax.random.normal(key, (SHAPE[0] * SHAPE[1], 6))
        dense = scale**2 * (factor @ factor.T).reshape(*SHAPE, *SHAPE) / 6
        return structure.project(dense)

    return jax.vmap(member)(jax.random.split(key, count), scales)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_positive_semidefinite_for_200_random_inputs(structure: type[Covariance], name: str):
    covs = psd_batch(KEYS[4], structure, 200)
    means = 2 * jax.random.normal(KEYS[5], (200, *SHAPE))

    @jax.jit
    @jax.vmap
    def run(mean, cov):
        mean, cov = TRANSFORMS[name](mean, cov)
        return mean, cov.to_dense(), cov.variance()

    means, dense, variance = run(means, covs)
    size = dense.shape[1] * dense.shape[2]
    flat = np.asarray(dense).reshape(200, size, size)
    lowest = np.linalg.eigvalsh(flat)[:, 0]
    largest = np.linalg.eigvalsh(flat)[:, -1]
    assert np.isfinite(means).all()
    assert (np.asarray(variance) >= 0).all()
    assert (lowest >= -1e-10 * np.maximum(largest, 1)).all(), (lowest / largest).min()


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_block_does_not_see_jit(structure: type[Covariance]):
    """Nor vmap: `test_properties.py` holds a batch of every transform against a loop."""

    def block(mean, cov):
        mean, cov = mj.encoder_block(mean, cov, BLOCK, num_heads=HEADS)
        return mean, cov.to_dense()

    cov = random_cov(KEYS[6], structure, SHAPE, 0.3)
    mean, dense = jax.jit(block)(MEAN, cov)
    with jax.disable_jit():
        eager_mean, eager = block(MEAN, cov)
    assert_close(eager_mean, mean)
    assert_close(eager, dense)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
@pytest.mark.parametrize("norm_first", [False, True])
def test_block_does_not_see_padding(structure: type[Covariance], norm_first: bool):
    @jax.jit
    def run(mean, cov, mask=None):
        mean, cov = mj.encoder_block(
            mean, cov, BLOCK, num_heads=HEADS, norm_first=norm_first, mask=mask
        )
        return mean, cov.to_dense()

    cov = random_cov(KEYS[6], structure, SHAPE, 0.3)
    mean, dense = run(MEAN, cov)
    padded_shape = (SHAPE[0] + 3, SHAPE[1])
    full = 0.5 * jax.random.normal(KEYS[7], (*padded_shape, 40))
    padded = jnp.einsum("tdk,sek->tdse", full, full) / 40
    padded = padded.at[: SHAPE[0], :, : SHAPE[0]].set(cov.to_dense())
    padded_mean = jnp.concatenate([MEAN, jnp.full((3, SHAPE[1]), 7.0)])
    mask = jnp.broadcast_to(jnp.arange(7) < SHAPE[0], (7, 7))
    if structure is mj.Separable:
        scale = jnp.concatenate([cov.scale, jnp.ones((3, 1)) * cov.scale[:1]])
        correlation = jnp.eye(7).at[: SHAPE[0], : SHAPE[0]].set(cov.token_correlation)
        padded_cov = mj.Separable(scale, correlation, cov.feature_correlation)
    elif structure is not mj.TokenCorrelated:  # the projection reads signs off the dense array
        padded_cov = structure.project(padded)
    else:
        scale = jnp.concatenate([cov.scale, jnp.ones((3, SHAPE[1]))])
        correlation = jnp.eye(7).at[: SHAPE[0], : SHAPE[0]].set(cov.correlation)
        padded_cov = mj.TokenCorrelated(scale, correlation)
    padded_mean, padded_dense = run(padded_mean, padded_cov, mask)
    assert_close(padded_mean[: SHAPE[0]], mean)
    assert_close(padded_dense[: SHAPE[0], :, : SHAPE[0]], dense)


# `post_norm` gives `attention` the same input: its gradient would not be finite if attention's were not.
@pytest.mark.parametrize(
    "name",
    [name for name in TRANSFORMS if name not in ("dense", "feed_forward", "pre_norm", "attention")],
)
@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_gradients_are_finite_at_zero_variance_and_at_huge_scores(
    structure: type[Covariance], name: str
):
    @jax.jit
    def gradients(mean, cov):
        def total(mean, cov):
            mean, cov = TRANSFORMS[name](mean, cov)
            return jnp.sum(mean**2) + jnp.sum(cov.variance())

        return jax.value_and_grad(total, argnums=(0, 1))(mean, cov)

    zeros = structure.zeros(SHAPE, jnp.float64)
    for scale in (0.0, 1.0, 1e4):
        leaves = jax.tree.leaves(gradients(scale * MEAN, zeros))
        assert all(jnp.isfinite(leaf).all() for leaf in leaves), scale


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_masked_keys_have_no_weight(structure: type[Covariance]):
    """With one key left, attention is that key's value: no other token matters, nor does the score."""
    mask = jnp.zeros((4, 4), bool).at[:, 2].set(True)
    run = jax.jit(lambda m, c: mj.attention(m, c, BLOCK.attention, num_heads=HEADS, mask=mask))
    cov = random_cov(KEYS[6], structure, SHAPE, 0.3)
    mean, result = run(MEAN, cov)
    moved, moved_cov = run(MEAN.at[0].add(100.0), cov)
    assert_close(moved, mean)
    assert_close(moved_cov.variance(), result.variance())

    def total(mean, cov):
        mean, cov = run(mean, cov)
        return jnp.sum(mean) + jnp.sum(cov.variance())

    gradients = jax.grad(total)(1e4 * MEAN, structure.zeros(SHAPE, jnp.float64))
    assert jnp.isfinite(gradients).all()
    nothing = mj.softmax(MEAN, cov, mask=jnp.zeros(SHAPE, bool))
    assert not nothing[0].any()
    assert not nothing[1].variance().any()


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_a_mask_without_any_key_leaves_the_residual(structure: type[Covariance]):
    def variance(structure):
        cov = structure.independent(jnp.full(SHAPE, 0.01))
        mask = jnp.zeros((4, 4), bool)
        return mj.encoder_block(MEAN, cov, BLOCK, num_heads=HEADS, mask=mask)[1].variance()

    ratio = jnp.sum(variance(structure)) / jnp.sum(variance(mj.Full))
    assert 0.7 < ratio < 1.4


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_nan_stays_nan(structure: type[Covariance]):
    """A standard deviation of 0 in its place would look like knowledge."""
    bad = MEAN.at[0, 0].set(jnp.nan)
    cov = structure.independent(jnp.full(SHAPE, 0.1))
    for name in ("dense", "softmax", "layer_norm", "gelu", "attention", "pre_norm", "post_norm"):
        mean, result = TRANSFORMS[name](bad, cov)
        wrong = ~jnp.isnan(result.variance()) & jnp.isnan(mean)
        assert not wrong.any(), name


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_a_certain_network_is_the_plain_network(structure: type[Covariance]):
    """With Point beliefs and a certain input the mean is Flax's output and the variance zero."""
    certain = random_block(KEYS[0], SHAPE[1], 8, family=mj.posterior.Point)
    mean, cov = mj.encoder_block(
        MEAN, structure.zeros(SHAPE, jnp.float64), certain, num_heads=HEADS, norm_first=True
    )
    arrays = mj.posterior.sample_params(certain, KEYS[1])
    plain = mj.nn.PlainEncoderBlock(
        arrays, num_heads=HEADS, norm_first=True, activation=jax.nn.relu, epsilon=1e-6
    )
    with jax.numpy_rank_promotion("allow"):
        # jax.nn.dot_product_attention takes its softmax in float32, whatever the inputs.
        assert_close(mean, plain(MEAN), 1e-6)
    assert not cov.variance().any()
