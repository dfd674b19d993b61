"""Laws of every structure: positive semidefinite, and the same under jit, vmap and padding."""

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


def block(**options):
    return lambda m, c, mask=None: mj.encoder_block(
        m, c, BLOCK, num_heads=HEADS, mask=mask, **options
    )


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
# Called with a mask.
MASKED = {
    "attention": lambda m, c, mask: mj.attention(m, c, BLOCK.attention, num_heads=HEADS, mask=mask),
}
BLOCKS = {"cross_attention": cross_attention, "pre_norm": block(norm_first=True)}
# Called with a mask, over `PADDED` tokens. Pre-norm too, for structures that summarise several tokens.
LONGER = {"post_norm": block(), "padded_pre_norm": block(norm_first=True)}
TRANSFORMS = [*ELEMENTARY, *MASKED, *BLOCKS, "post_norm"]

# Every transform runs once, over one batch with these rows.
COUNT = 200
RANDOM, NAN, MEMBER, ONE_KEY, MOVED, NO_KEY = slice(COUNT), *range(COUNT, COUNT + 5)
GROUPS = {
    "elementary": ELEMENTARY,
    "attention": MASKED,
    **{name: {name: transform} for name, transform in (BLOCKS | LONGER).items()},
}


def member(structure: type[Covariance], key=KEYS[6]) -> Covariance:
    """A random member with every field set, so that all rows share one pytree structure."""
    return with_sum(random_cov(key, structure, SHAPE, 0.3))


def with_sum(cov: Covariance) -> Covariance:
    if not isinstance(cov, mj.Separable):
        return cov
    return dataclasses.replace(cov, sum_variance=cov.pooled_variance())


def padded(structure: type[Covariance]) -> Covariance:
    """A member of the structure over `PADDED` tokens; over the first ones it is `member`."""
    cov, tokens, extra = member(structure), SHAPE[0], PADDED - SHAPE[0]
    correlation = jnp.eye(PADDED)
    if structure is mj.Separable:
        scale = jnp.concatenate([cov.scale, jnp.ones((extra, 1)) * cov.scale[:1]])
        correlation = correlation.at[:tokens, :tokens].set(cov.token_correlation)
        return with_sum(mj.Separable(scale, correlation, cov.feature_correlation))
    if structure is mj.TokenCorrelated:  # the projection reads signs off the dense array
        scale = jnp.concatenate([cov.scale, jnp.ones((extra, SHAPE[1]))])
        correlation = correlation.at[:tokens, :tokens].set(cov.correlation)
        return mj.TokenCorrelated(scale, correlation)
    full = 0.5 * jax.random.normal(KEYS[7], (PADDED, SHAPE[1], 40))
    dense = jnp.einsum("tdk,sek->tdse", full, full) / 40
    return structure.project(dense.at[:tokens, :, :tokens].set(cov.to_dense()))


def rows(structure: type[Covariance], longer: bool):
    """Means, covariances and masks of all rows."""
    shape = (PADDED if longer else SHAPE[0], SHAPE[1])

    def draw(key, scale):
        factor = jax.random.normal(key, (shape[0] * shape[1], 6))
        dense = scale**2 * (factor @ factor.T).reshape(*shape, *shape) / 6
        return structure.project(dense)

    # Large and small, of full and of low rank.
    scales = 10 ** jax.random.uniform(KEYS[4], (COUNT,), minval=-2, maxval=0.3)
    drawn = jax.jit(jax.vmap(draw))(jax.random.split(KEYS[4], COUNT), scales)
    known = padded(structure) if longer else member(structure)
    noisy, quiet = (structure.independent(jnp.full(shape, size)) for size in (0.1, 0.01))
    others = noisy, known, known, known, quiet
    covs = jax.tree.map(lambda many, *few: np.concatenate([many, np.stack(few)]), drawn, *others)
    mean = np.concatenate([MEAN, 7 * MEAN[: shape[0] - SHAPE[0]]])
    nan, moved = mean.copy(), mean.copy()
    nan[0, 0] = np.nan
    moved[0] += 100
    means = np.stack([nan, mean, mean, moved, mean])
    means = np.concatenate([2 * jax.random.normal(KEYS[5], (COUNT, *shape)), means])
    tokens = np.arange(shape[0])
    masks = np.ones((len(means), shape[0], shape[0]), bool)
    masks[: COUNT // 2] = np.random.default_rng(0).random((COUNT // 2, *masks.shape[1:])) < 0.7
    masks[MEMBER] = tokens < SHAPE[0]
    masks[[ONE_KEY, MOVED]] = tokens == 2
    masks[NO_KEY] = False
    return means, covs, masks


@pytest.fixture(scope="module")
def run():
    """Mean, dense covariance and variance of all rows by one transform."""

    @functools.cache
    def group(structure: type[Covariance], name: str):
        def one(mean, cov, mask):
            masks = (mask,) if GROUPS[name] is MASKED or name in LONGER else ()

            def moments(transform):
                out, out_cov = transform(mean, cov, *masks)
                return out, out_cov.to_dense(), out_cov.variance()

            return {name: moments(transform) for name, transform in GROUPS[name].items()}

        return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(*rows(structure, name in LONGER)))

    return lambda structure, name: group(structure, "elementary" if name in ELEMENTARY else name)[
        name
    ]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_positive_semidefinite_for_200_random_inputs(structure, name, run):
    means, dense, variance = (part[RANDOM] for part in run(structure, name))
    size = dense.shape[1] * dense.shape[2]
    spectrum = np.linalg.eigvalsh(dense.reshape(COUNT, size, size))
    lowest, largest = spectrum[:, 0], spectrum[:, -1]
    assert np.isfinite(means).all()
    assert (variance >= 0).all()
    assert (lowest >= -1e-10 * np.maximum(largest, 1)).all(), (lowest / largest).min()


def of_the_member(structure, name, run):
    """The mean and the covariance of the tokens of `SHAPE`."""
    mean, dense, _ = (part[MEMBER] for part in run(structure, name))
    return mean[: SHAPE[0]], dense[: SHAPE[0], :, : SHAPE[0]]


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_block_sees_neither_jit_nor_vmap_nor_padding(structure, run):
    with jax.disable_jit():
        mean, cov = LONGER["post_norm"](MEAN, member(structure))
        dense = cov.to_dense()
    found_mean, found = of_the_member(structure, "post_norm", run)
    assert_close(found_mean, mean)
    assert_close(found, dense)


@pytest.mark.parametrize("structure", [mj.TokenCorrelated, mj.Separable])
def test_pre_norm_does_not_see_padding(structure: type[Covariance], run):
    alone, beside = (of_the_member(structure, n, run) for n in ("pre_norm", "padded_pre_norm"))
    for expected, found in zip(alone, beside, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_a_mask_without_any_key_leaves_the_residual(structure: type[Covariance], run):
    own, full = (run(s, "post_norm")[2][NO_KEY] for s in (structure, mj.Full))
    assert 0.7 < np.sum(own) / np.sum(full) < 1.4


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_masked_keys_have_no_weight(structure: type[Covariance], run):
    """With one key left, attention returns its value: other tokens and the score do not matter."""
    mean, _, variance = run(structure, "attention")
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
        mean, _, variance = (part[NAN] for part in run(structure, name))
        assert np.isnan(mean).any(), name
        assert not (np.isnan(mean) & ~np.isnan(variance)).any(), name
