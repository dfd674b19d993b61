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
    rank_one,
)
from tests.transforms import TRANSFORMS, Given

pytestmark = pytest.mark.slow

KEYS = jax.random.split(jax.random.key(2), 8)
SHAPE, PADDED = (4, 6), 7
BLOCK = random_block(KEYS[0], SHAPE[1], 8, 0.3)
MEAN = jax.random.normal(KEYS[1], SHAPE)
MEMORY = jax.random.normal(KEYS[2], (5, 6))
MEMORY_NOISE = random_dense(KEYS[3], (5, 6), 0.5)

# Every transform runs once, over one batch with these rows.
COUNT = 200
RANDOM, NAN, MEMBER, ONE_KEY, MOVED, NO_KEY = slice(COUNT), *range(COUNT, COUNT + 5)
ELEMENTARY = (
    *("dense", "softmax", "layer_norm", "relu", "gelu", "tanh", "feed_forward", "mean_pool"),
    "attention",
)
BLOCKS = "post_norm", "pre_norm"  # over `PADDED` tokens
NAMES = *ELEMENTARY, "cross_attention", *BLOCKS


def transform(name: str, mean, cov, mask=None):
    memory = MEMORY, rank_one(type(cov).project(MEMORY_NOISE))
    given = Given(BLOCK, (), memory, mask=mask, norm_first=name == "pre_norm")
    return TRANSFORMS["encoder_block" if name in BLOCKS else name](mean, cov, given)


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
    def group(structure: type[Covariance], names: tuple[str, ...]):
        def one(mean, cov, mask):
            found = {name: transform(name, mean, cov, mask) for name in names}
            return {name: (m, c.to_dense(), c.variance()) for name, (m, c) in found.items()}

        given = rows(structure, names[0] in BLOCKS)
        return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(*given))

    return lambda structure, name: group(structure, ELEMENTARY if name in ELEMENTARY else (name,))[
        name
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_positive_semidefinite_for_200_random_inputs(structure, name, run):
    means, dense, variance = (part[RANDOM] for part in run(structure, name))
    size = dense.shape[1] * dense.shape[2]
    spectrum = np.linalg.eigvalsh(dense.reshape(COUNT, size, size))
    lowest, largest = spectrum[:, 0], spectrum[:, -1]
    assert np.isfinite(means).all()
    assert (variance >= 0).all()
    assert (lowest >= -1e-10 * np.maximum(largest, 1)).all(), (lowest / largest).min()


# In pre-norm too, for structures that summarise several tokens.
@pytest.mark.parametrize(
    ("structure", "name"),
    [*((s, "post_norm") for s in ALL_STRUCTURES)]
    + [(s, "pre_norm") for s in (mj.TokenCorrelated, mj.Separable)],
)
def test_block_sees_neither_jit_nor_vmap_nor_padding(structure, name, run):
    with jax.disable_jit():
        mean, cov = transform(name, MEAN, member(structure))
        dense = cov.to_dense()
    found_mean, found, _ = (part[MEMBER] for part in run(structure, name))
    assert_close(found_mean[: SHAPE[0]], mean)
    assert_close(found[: SHAPE[0], :, : SHAPE[0]], dense)


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
