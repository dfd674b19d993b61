"""Laws of the blocks, by one program of a pre-norm and one of a post-norm block for each structure.

A row of its batch is an input; its results are moments and gradients, after one block or two.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.covariance import Covariance
from tests.builders import (
    assert_close,
    assert_semidefinite,
    decoder_of,
    first_tokens,
    random_block,
    random_dense,
    random_moments,
    scaled,
    stacked,
)

SHAPE, REAL, SEEN = (4, 6), 3, 2  # REAL tokens in a row with padding; later ones than SEEN change
KEYS = jax.random.split(jax.random.key(4), 6)
BLOCK = random_block(KEYS[0], SHAPE[1], 8, 0.3)
SURE = random_block(jax.random.key(5), SHAPE[1], 8, 0.1)  # see tests/laws/test_layers.py
MEAN = np.asarray(jax.random.normal(KEYS[1], SHAPE))
EVERY_KEY = np.ones((SHAPE[0], SHAPE[0]), bool)
CAUSAL = np.tril(EVERY_KEY)
COUNT = 200
GAINS = [("x", 1), ("x", 10), ("x", 100), ("x", 1000), ("both", 1), ("both", 10), ("both", 100)]


def block(mean, cov, params, mask, norm_first):
    return mj.encoder_block(mean, cov, params, num_heads=2, norm_first=norm_first, mask=mask)


def changed(mean, noise):
    """The same with other tokens after the first `SEEN`."""
    later = np.arange(len(mean))[:, None] >= SEEN
    return np.where(later, 5 - 3 * mean, mean), np.where(later, 30 * noise, noise)


def special_rows(structure: type[Covariance]) -> dict[Any, tuple[Any, ...]]:
    """Mean, covariance, parameters and mask, and whether there are two blocks, by name."""
    noise = np.random.default_rng(1).uniform(size=SHAPE)
    left_padded = CAUSAL & (np.arange(SHAPE[0]) > 0)
    member = structure.project(random_dense(KEYS[2], SHAPE, 0.3))
    given = {"padded": (MEAN, member, BLOCK, np.arange(SHAPE[0]) < REAL, True)}
    for name, mask in {"causal": CAUSAL, "left padded": left_padded}.items():
        for of, (x, v) in {"first": (MEAN, noise), "second": changed(MEAN, noise)}.items():
            given[name, of] = x, structure.independent(v), BLOCK, mask, True
    for of, gain in GAINS:
        quiet = structure.independent(jnp.full(SHAPE, 0.01 * gain**2))
        params = scaled(SURE, gain if of == "both" else 1)
        given[of, gain] = gain * MEAN, quiet, params, EVERY_KEY, False
    zero = structure.zeros(SHAPE, jnp.float64)
    given["certain"] = MEAN, zero, scaled(SURE, 3), EVERY_KEY, False
    given["huge scores"] = 1e4 * MEAN, zero, scaled(SURE, 3), EVERY_KEY, False
    return {
        name: (x, cov, p, np.broadcast_to(mask, EVERY_KEY.shape), twice)
        for name, (x, cov, p, mask, twice) in given.items()
    }


def total(mean, cov, params, mask, twice, norm_first):
    """A loss, and the moments: of one block, or of two, of which one is compiled."""

    def step(carry, second):
        new = block(*carry, params, mask, norm_first)
        return jax.tree.map(lambda a, b: jnp.where(second, a, b), new, carry), None

    (mean, cov), _ = jax.lax.scan(step, (mean, cov), jnp.stack([jnp.asarray(True), twice]))
    terms = [mean**2, cov.variance()]
    terms = [jnp.sum(term) / jax.lax.stop_gradient(1 + jnp.max(term)) for term in terms]
    return sum(terms), (mean, cov.to_dense(), cov.variance(), cov.token_gram())


@pytest.fixture(scope="module")
def run():
    """Results by row: gradients, mean, dense covariance, variance and token Gram matrix."""

    @functools.cache
    def of(structure: type[Covariance], norm_first: bool):
        special = special_rows(structure)
        means, covs, masks = random_moments(structure, SHAPE, COUNT)
        random = means, covs, stacked([BLOCK] * COUNT), masks, np.zeros(COUNT, bool)
        given = jax.tree.map(
            lambda a, b: np.concatenate([a, b]), random, stacked([*special.values()])
        )
        gradient = jax.grad(partial(total, norm_first=norm_first), (0, 1, 2), has_aux=True)
        slopes, found = jax.tree.map(np.asarray, jax.jit(jax.vmap(gradient))(*given))
        places = dict(zip(special, range(COUNT, COUNT + len(special)), strict=True))
        return slopes, found, {"random": slice(COUNT), **places}

    def part(structure, norm_first, row):
        slopes, found, places = of(structure, norm_first)
        return jax.tree.map(lambda leaf: leaf[places[row]], (slopes, *found))

    return part


# Post-norm has no branch of a structure's own.
SLOW = [(mj.Separable, True), (mj.Full, True), (mj.Separable, False)]
blocks = pytest.mark.parametrize(
    ("structure", "norm_first"),
    [(mj.Diagonal, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)


@blocks
def test_positive_semidefinite_with_finite_gradients(structure, norm_first, run):
    slopes, mean, dense, variance, _ = run(structure, norm_first, "random")
    assert_semidefinite(mean, dense, variance)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


@blocks
def test_blocks_see_neither_vmap_nor_scan_nor_padding(structure, norm_first, run):
    given, cov, params, _, _ = special_rows(structure)["padded"]

    def two(given, cov):
        mean, cov = given[:REAL], first_tokens(cov, REAL)
        for _ in range(2):
            mean, cov = block(mean, cov, params, None, norm_first)
        return mean, cov.to_dense()

    mean, dense = jax.jit(two)(given, cov)
    _, found_mean, found, _, _ = run(structure, norm_first, "padded")
    assert_close(found_mean[:REAL], mean)
    assert_close(found[:REAL, :, :REAL], dense)


def test_a_block_sees_no_jit():
    """Nor which arrays are known: those of the compiled one are constants of its program."""
    mean, cov, params, mask, _ = special_rows(mj.Diagonal)["padded"]

    def moments():
        mean_out, cov_out = block(mean, cov, params, mask, True)
        return mean_out, cov_out.variance()

    compiled = jax.jit(moments)()
    with jax.disable_jit():
        jax.tree.map(assert_close, moments(), compiled)


@blocks
def test_later_tokens_change_nothing(structure, norm_first, run):
    for mask in ("causal", "left padded"):
        pair = [run(structure, norm_first, (mask, of))[1:] for of in ("first", "second")]
        (mean, _, variance, gram), (moved_mean, _, moved, moved_gram) = pair
        assert_close(moved_mean[:SEEN], mean[:SEEN])
        assert_close(moved[:SEEN], variance[:SEEN])
        assert_close(moved_gram[:SEEN, :SEEN], gram[:SEEN, :SEEN])
        assert not np.allclose(moved[SEEN:], variance[SEEN:])


@blocks
def test_float32_and_gradients(structure, norm_first, run):
    """Variances of many scales to a hundredth, and finite slopes, also where nothing is random."""
    special = special_rows(structure)
    special = {row: special[row] for row in (*GAINS, "certain", "huge scores")}

    def loss(mean, cov, params):
        mean, cov = block(mean, cov, params, None, norm_first)
        terms = [mean**2, cov.variance()]
        # Normalise each term: a plain sum would overflow float32.
        terms = [jnp.sum(term) / jax.lax.stop_gradient(1 + jnp.max(term)) for term in terms]
        return sum(terms), cov.variance()

    single = jax.tree.map(np.float32, stacked([row[:3] for row in special.values()]))
    slopes, variances = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2), has_aux=True)))(*single)
    assert {leaf.dtype for leaf in jax.tree.leaves((slopes, variances))} == {jnp.dtype("float32")}
    assert all(np.isfinite(slope).all() for slope in jax.tree.leaves(slopes))
    for row, got in zip(special, np.asarray(variances), strict=True):
        want = run(structure, norm_first, row)[3]
        assert np.min(got) >= 0, row
        if row in GAINS:
            # Relative to the entry's own variance, or to 1e-4 of the largest if that is more.
            error = np.abs(got - want) / np.maximum(want, 1e-4 * np.max(want))
            assert np.max(error) < 0.01, row


# `Separable` restores positive semidefiniteness in layers of few features only.
WIDE = 14
MEMORY = jax.random.normal(KEYS[4], (5, WIDE))
DECODER = decoder_of(random_block(KEYS[0], WIDE, 8, 0.5))


def decoder(mean, cov, mask):
    memory = MEMORY, type(cov).independent(0.1 + 0 * MEMORY)

    def layer(carry, _):
        moments = mj.decoder_block(*carry, *memory, DECODER, num_heads=2, mask=mask)
        return moments, None

    return jax.lax.scan(layer, (mean, cov), None, 2)[0]


@pytest.mark.slow
def test_later_tokens_change_nothing_in_wide_layers():
    @jax.jit
    def moments(mean, noise):
        mean, cov = decoder(mean, mj.Separable.independent(noise), CAUSAL)
        return mean, cov.variance(), cov.token_gram()[:, :SEEN]

    random = np.random.default_rng(0)
    given = random.normal(size=(SHAPE[0], WIDE)), random.uniform(size=(SHAPE[0], WIDE))
    first, second = moments(*given), moments(*changed(*given))
    for one, other in zip(first, second, strict=True):
        assert_close(other[:SEEN], one[:SEEN])
    assert not jnp.allclose(second[1][SEEN:], first[1][SEEN:])


def test_a_certain_first_token_hides_no_noise():
    """Its zero covariance is not used for the other tokens."""
    mean = jax.random.normal(KEYS[2], (SHAPE[0], WIDE))
    noise = jnp.full(mean.shape, 0.5).at[0].set(0)
    params = random_block(KEYS[0], WIDE, 8, family=mj.posterior.Point).attention
    run = jax.jit(
        lambda cov: mj.attention(mean, cov, params, num_heads=2, mask=CAUSAL)[1].variance()[1:]
    )
    separable, full = (run(s.independent(noise)) for s in (mj.Separable, mj.Full))
    assert 0.5 < jnp.mean(separable) / jnp.mean(full) < 2
