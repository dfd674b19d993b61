"""Laws of every structure: positive semidefinite, the same under jit, vmap and padding, finite."""

from __future__ import annotations

import dataclasses
import functools

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
SHAPE, HEADS, PADDED = (4, 6), 2, 7
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


ELEMENTARY = {
    "dense": lambda m, c: mj.dense(m, c, BLOCK.attention.query),
    "softmax": mj.softmax,
    "layer_norm": lambda m, c: mj.layer_norm(m, c, NORM),
    "relu": mj.relu,
    "gelu": mj.gelu,
    "tanh": lambda m, c: mj.activation(m, c, jnp.tanh),
    "feed_forward": lambda m, c: mj.feed_forward(m, c, BLOCK.feed_forward, activation=mj.relu),
    "mean_pool": mj.mean_pool,
}
# Called with a mask; all other transforms are compiled without one.
MASKED = {
    "attention": lambda m, c, mask: mj.attention(m, c, BLOCK.attention, num_heads=HEADS, mask=mask),
}
BLOCKS = {
    "cross_attention": cross_attention,
    "post_norm": lambda m, c: mj.encoder_block(m, c, BLOCK, num_heads=HEADS),
    "pre_norm": lambda m, c: mj.encoder_block(m, c, BLOCK, num_heads=HEADS, norm_first=True),
}
TRANSFORMS = [*ELEMENTARY, *MASKED, *BLOCKS]
WITHOUT_GRADIENT = {"dense", "feed_forward", "pre_norm"}  # their parts are tested

# Every transform runs once, over one batch with these rows.
COUNT = 200
RANDOM, NAN, MEMBER, ONE_KEY, MOVED, HUGE_ONE_KEY = slice(COUNT), *range(COUNT, COUNT + 5)
LIMITS = slice(COUNT + 5, COUNT + 8)  # certain inputs of size 0, 1 and 1e4
GROUPS = {
    "elementary": ELEMENTARY,
    "attention": MASKED,
    **{name: {name: transform} for name, transform in BLOCKS.items()},
}


def member(structure: type[Covariance], key=KEYS[6]) -> Covariance:
    """A random member with every field set, so that all rows share one pytree structure."""
    return with_sum(random_cov(key, structure, SHAPE, 0.3))


def with_sum(cov: Covariance) -> Covariance:
    if not isinstance(cov, mj.Separable):
        return cov
    return dataclasses.replace(cov, sum_variance=cov.pooled_variance())


def rows(structure: type[Covariance]):
    """Means, covariances and masks of all rows."""

    def draw(key, scale):
        factor = jax.random.normal(key, (SHAPE[0] * SHAPE[1], 6))
        dense = scale**2 * (factor @ factor.T).reshape(*SHAPE, *SHAPE) / 6
        return structure.project(dense)

    # Large and small, of full and of low rank.
    scales = 10 ** jax.random.uniform(KEYS[4], (COUNT,), minval=-2, maxval=0.3)
    drawn = jax.jit(jax.vmap(draw))(jax.random.split(KEYS[4], COUNT), scales)
    known, zeros = member(structure), structure.zeros(SHAPE, jnp.float64)
    noisy = structure.independent(jnp.full(SHAPE, 0.1))
    others = noisy, known, known, known, zeros, zeros, zeros, zeros
    covs = jax.tree.map(lambda many, *few: np.concatenate([many, np.stack(few)]), drawn, *others)
    means = [MEAN.at[0, 0].set(jnp.nan), MEAN, MEAN, MEAN.at[0].add(100.0), 1e4 * MEAN]
    means += [scale * MEAN for scale in (0.0, 1.0, 1e4)]
    means = np.concatenate([2 * jax.random.normal(KEYS[5], (COUNT, *SHAPE)), np.stack(means)])
    masks = np.ones((len(means), SHAPE[0], SHAPE[0]), bool)
    masks[: COUNT // 2] = np.random.default_rng(0).random((COUNT // 2, *masks.shape[1:])) < 0.7
    masks[[ONE_KEY, MOVED, HUGE_ONE_KEY]] = np.arange(SHAPE[0]) == 2
    return means, covs, masks


@pytest.fixture(scope="module")
def run():
    """Results of one transform on all rows: ((mean, dense, variance), gradients or None)."""

    @functools.cache
    def group(structure: type[Covariance], name: str):
        def one(mean, cov, mask):
            masks = (mask,) if GROUPS[name] is MASKED else ()

            def total(mean, cov, transform):
                mean, cov = transform(mean, cov, *masks)
                moments = mean, cov.to_dense(), cov.variance()
                return jnp.sum(mean**2) + jnp.sum(moments[2]), moments

            def both(name, transform):
                if name in WITHOUT_GRADIENT:
                    return total(mean, cov, transform)[1], None
                slopes, moments = jax.grad(total, (0, 1), has_aux=True)(mean, cov, transform)
                return moments, slopes

            return {name: both(name, transform) for name, transform in GROUPS[name].items()}

        return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(*rows(structure)))

    return lambda structure, name: group(structure, "elementary" if name in ELEMENTARY else name)[
        name
    ]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_positive_semidefinite_for_200_random_inputs(structure, name, run):
    means, dense, variance = (part[RANDOM] for part in run(structure, name)[0])
    size = dense.shape[1] * dense.shape[2]
    spectrum = np.linalg.eigvalsh(dense.reshape(COUNT, size, size))
    lowest, largest = spectrum[:, 0], spectrum[:, -1]
    assert np.isfinite(means).all()
    assert (variance >= 0).all()
    assert (lowest >= -1e-10 * np.maximum(largest, 1)).all(), (lowest / largest).min()


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name not in WITHOUT_GRADIENT])
@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_gradients_are_finite_at_zero_variance_and_at_huge_scores(structure, name, run):
    for leaf in jax.tree.leaves(run(structure, name)[1]):
        assert np.isfinite(leaf[LIMITS]).all()
        assert np.isfinite(leaf[HUGE_ONE_KEY]).all()


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_block_sees_neither_jit_nor_vmap(structure, run):
    with jax.disable_jit():
        mean, cov = BLOCKS["post_norm"](MEAN, member(structure))
        dense = cov.to_dense()
    expected_mean, expected, _ = (part[MEMBER] for part in run(structure, "post_norm")[0])
    assert_close(mean, expected_mean)
    assert_close(dense, expected)


@pytest.fixture(scope="module")
def longer():
    """A compiled block over `PADDED` tokens."""

    @functools.cache
    def compiled(structure: type[Covariance], norm_first: bool):
        @jax.jit
        def block(mean, cov, mask):
            mean, cov = mj.encoder_block(
                mean, cov, BLOCK, num_heads=HEADS, norm_first=norm_first, mask=mask
            )
            return mean, cov.to_dense(), cov.variance()

        return block

    return compiled


# Both orders of the norm where a structure summarises several tokens together.
@pytest.mark.parametrize(
    ("structure", "name"),
    [(structure, "post_norm") for structure in ALL_STRUCTURES]
    + [(mj.TokenCorrelated, "pre_norm"), (mj.Separable, "pre_norm")],
)
def test_block_does_not_see_padding(structure: type[Covariance], name: str, run, longer):
    cov, tokens, extra = member(structure), SHAPE[0], PADDED - SHAPE[0]
    full = 0.5 * jax.random.normal(KEYS[7], (PADDED, SHAPE[1], 40))
    padded = jnp.einsum("tdk,sek->tdse", full, full) / 40
    padded = padded.at[:tokens, :, :tokens].set(cov.to_dense())
    correlation = jnp.eye(PADDED)
    if structure is mj.Separable:
        scale = jnp.concatenate([cov.scale, jnp.ones((extra, 1)) * cov.scale[:1]])
        correlation = correlation.at[:tokens, :tokens].set(cov.token_correlation)
        padded_cov = with_sum(mj.Separable(scale, correlation, cov.feature_correlation))
    elif structure is mj.TokenCorrelated:  # the projection reads signs off the dense array
        scale = jnp.concatenate([cov.scale, jnp.ones((extra, SHAPE[1]))])
        correlation = correlation.at[:tokens, :tokens].set(cov.correlation)
        padded_cov = mj.TokenCorrelated(scale, correlation)
    else:
        padded_cov = structure.project(padded)
    padded_mean = jnp.concatenate([MEAN, jnp.full((extra, SHAPE[1]), 7.0)])
    mask = jnp.broadcast_to(jnp.arange(PADDED) < tokens, (PADDED, PADDED))
    mean, dense, _ = longer(structure, name == "pre_norm")(padded_mean, padded_cov, mask)
    expected_mean, expected, _ = (part[MEMBER] for part in run(structure, name)[0])
    assert_close(mean[:tokens], expected_mean)
    assert_close(dense[:tokens, :, :tokens], expected)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_a_mask_without_any_key_leaves_the_residual(structure: type[Covariance], longer):
    mean = jax.random.normal(KEYS[1], (PADDED, SHAPE[1]))

    def variance(structure):
        cov = structure.independent(jnp.full(mean.shape, 0.01))
        return longer(structure, False)(mean, cov, jnp.zeros((PADDED, PADDED), bool))[2]

    ratio = jnp.sum(variance(structure)) / jnp.sum(variance(mj.Full))
    assert 0.7 < ratio < 1.4


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_masked_keys_have_no_weight(structure: type[Covariance], run):
    """With one key left, attention returns its value: other tokens and the score do not matter."""
    mean, _, variance = run(structure, "attention")[0]
    assert_close(mean[MOVED], mean[ONE_KEY])
    assert_close(variance[MOVED], variance[ONE_KEY])
    nothing = jax.jit(lambda cov: mj.softmax(MEAN, cov, mask=jnp.zeros(SHAPE, bool)))
    mean, cov = nothing(member(structure))
    assert not mean.any()
    assert not cov.variance().any()


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_nan_stays_nan(structure: type[Covariance], run):
    """A standard deviation of 0 instead would look like certainty."""
    for name in ("dense", "softmax", "layer_norm", "gelu", "attention", "pre_norm", "post_norm"):
        mean, _, variance = (part[NAN] for part in run(structure, name)[0])
        assert np.isnan(mean).any(), name
        assert not (np.isnan(mean) & ~np.isnan(variance)).any(), name


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_a_certain_network_is_the_plain_network(structure: type[Covariance]):
    """With Point beliefs and a certain input the mean is Flax's output and the variance zero."""
    certain = random_block(KEYS[0], SHAPE[1], 8, family=mj.posterior.Point)
    arrays = mj.posterior.sample_params(certain, KEYS[1])
    plain = mj.nn.PlainEncoderBlock(
        arrays, num_heads=HEADS, norm_first=True, activation=jax.nn.relu, epsilon=1e-6
    )

    @jax.jit
    def both(mean):
        cov = structure.zeros(SHAPE, jnp.float64)
        out, cov = mj.encoder_block(mean, cov, certain, num_heads=HEADS, norm_first=True)
        with jax.numpy_rank_promotion("allow"):
            return out, cov.variance(), plain(mean)

    mean, variance, expected = both(MEAN)
    # jax.nn.dot_product_attention takes its softmax in float32, whatever the inputs.
    assert_close(mean, expected, 1e-6)
    assert not variance.any()
