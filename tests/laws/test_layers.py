"""Laws of every layer in every structure: positive semidefinite, the same compiled or not, float32.

Each structure has two programs, each over one batch: moments in float64, and gradients in float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from tests.builders import (
    KERNEL_FAMILIES,
    assert_close,
    assert_semidefinite,
    member,
    quickly,
    random_block,
    random_dense,
    random_moments,
    scaled,
    stacked,
)
from tests.transforms import LAYERS, Given

SHAPE, REAL = (4, 6), 3  # of which one row has one token of padding
KEYS = jax.random.split(jax.random.key(2), 8)
BLOCK = random_block(KEYS[0], SHAPE[1], 8, 0.3)
# In this draw of nine, rows with all but 1e-8 of their weight on one key have the most noise.
SURE = random_block(jax.random.key(5), SHAPE[1], 8, 0.1)
MEAN = np.asarray(jax.random.normal(jax.random.key(1), SHAPE))
EVERY_KEY = np.ones((SHAPE[0], SHAPE[0]), bool)
ONE_KEY = np.broadcast_to(np.arange(SHAPE[0]) == 2, EVERY_KEY.shape)
NO_KEY = np.zeros_like(EVERY_KEY)
COUNT = 200
GAINS = [("x", 1), ("x", 10), ("x", 100), ("x", 1000), ("both", 1), ("both", 10), ("both", 100)]
HUGE = {"zero": 0, "certain": 1, "huge scores": 1e4, "huge scores, one key": 1e4, "no key": 1}


def moments(mean, cov, memory, block, mask, names=tuple(LAYERS)):
    """Mean and covariance of every layer."""
    noise = type(cov).independent(0.01 * cov.variance()[: len(memory)])
    other = mean.T, type(cov).independent(cov.variance().T)
    given = Given(block, other, (memory, noise), mask, mask[:, : len(memory)])
    return {name: LAYERS[name](mean, cov, given) for name in names}


def special_rows(structure):
    """Arguments of `moments`, by name."""
    moved = MEAN.copy()
    moved[0] += 100
    noisy = structure.independent(jnp.full(SHAPE, 0.1))
    zero = structure.zeros(SHAPE, jnp.float64)
    member = structure.project(random_dense(KEYS[6], SHAPE, 0.3))
    given = {
        "nan": (np.where(np.arange(24).reshape(SHAPE) == 0, np.nan, MEAN), noisy, BLOCK, EVERY_KEY),
        "padded": (MEAN, member, BLOCK, np.arange(SHAPE[0]) < REAL),
        "one key": (MEAN, member, BLOCK, ONE_KEY),
        "moved": (moved, member, BLOCK, ONE_KEY),
    }
    for of, gain in GAINS:
        quiet = structure.independent(jnp.full(SHAPE, 0.01 * gain**2))
        given[of, gain] = gain * MEAN, quiet, scaled(SURE, gain if of == "both" else 1), EVERY_KEY
    masks = {"huge scores, one key": ONE_KEY, "no key": NO_KEY}
    for name, size in HUGE.items():
        own = noisy if name == "no key" else zero
        given[name] = size * MEAN, own, scaled(SURE, 3), masks.get(name, EVERY_KEY)
    return {
        name: (mean, cov, 0.5 * mean, block, np.broadcast_to(mask, EVERY_KEY.shape))
        for name, (mean, cov, block, mask) in given.items()
    }


def batch(structure, special, of_random):
    """Arguments of 200 random rows and of the special ones, and the place of each by name."""
    random = of_random(*random_moments(structure, SHAPE, COUNT))
    rows = stacked([*special.values()])
    given = jax.tree.map(lambda a, b: np.concatenate([a, b]), random, rows)
    places = dict(zip(special, range(COUNT, COUNT + len(special)), strict=True))
    return given, {"random": slice(COUNT), **places}


def loss_of(moments):
    """Squared means and variances, each over its largest: a plain sum would overflow float32."""
    terms = [term for mean, cov in moments for term in (mean**2, cov.variance())]
    return sum(jnp.sum(term) / jax.lax.stop_gradient(1 + jnp.max(term)) for term in terms)


def assert_variance(got, want, row):
    """In float32: not negative, and to a hundredth where something is random.

    Relative to the entry's own variance, or to 1e-4 of the largest if that is more.
    """
    assert np.min(got) >= 0, row
    if row in GAINS:
        assert np.max(np.abs(got - want) / np.maximum(want, 1e-4 * np.max(want))) < 0.01, row


@pytest.fixture(scope="module")
def run():
    """Mean, dense covariance and variance by every layer, of 200 random rows and the special ones."""

    @functools.cache
    def of(structure):
        def random(means, covs, masks):
            return means, covs, 0.5 * means[::-1], stacked([BLOCK] * COUNT), masks

        def one(*given):
            found = moments(*given)
            return {name: (m, c.to_dense(), c.variance()) for name, (m, c) in found.items()}

        given, places = batch(structure, special_rows(structure), random)
        return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(*given)), places

    def part(structure, name, row):
        found, places = of(structure)
        return [array[places[row]] for array in found[name]]

    return part


@pytest.mark.parametrize("name", LAYERS)
@quickly(mj.Separable)
def test_positive_semidefinite_for_200_random_inputs(structure, name, run):
    assert_semidefinite(*run(structure, name, "random"))


@quickly(mj.Separable)
def test_layers_see_neither_vmap_nor_padding_of_a_memory_nor_which_arrays_are_known(structure, run):
    """Arguments that are constants of the program, of a memory without its padding, one at a time."""
    mean, cov, memory, block, mask = special_rows(structure)["padded"]

    @jax.jit
    def alone():
        found = moments(mean, cov, memory[:REAL], block, mask)
        return {name: (m, c.to_dense()) for name, (m, c) in found.items()}

    for name, (own_mean, own) in alone().items():
        found_mean, found, _ = run(structure, name, "padded")
        assert_close(found_mean, own_mean)
        assert_close(found, own)


# A block has the others: tests/laws/test_blocks.py.
@pytest.mark.parametrize("name", ["matmul", "gelu", "softmax"])
def test_layers_see_no_jit(name):
    mean, cov, memory, block, mask = special_rows(mj.Diagonal)["padded"]

    def layer():
        found, found_cov = moments(mean, cov, memory, block, mask, names=(name,))[name]
        return found, found_cov.variance()

    compiled = jax.jit(layer)()
    with jax.disable_jit():
        jax.tree.map(assert_close, layer(), compiled)


@quickly(mj.Separable)
def test_masked_keys_have_no_weight(structure, run):
    """With one key left, attention returns its value: other tokens and the score do not matter."""
    moved, alone = (run(structure, "attention", row) for row in ("moved", "one key"))
    assert_close(moved[0], alone[0])
    assert_close(moved[2], alone[2])
    for name in ("attention", "cross_attention"):
        mean, _, _ = run(structure, name, "no key")
        bias = scaled(SURE, 3).attention.output.bias.mean
        assert_close(mean, jnp.broadcast_to(bias, mean.shape))
    mean, cov = mj.softmax(jnp.full((2, 3), -jnp.inf), structure.independent(jnp.ones((2, 3))))
    assert not mean.any()
    assert not cov.variance().any()


@quickly(mj.Separable)
def test_nan_stays_nan(structure, run):
    """A standard deviation of 0 instead would look like certainty."""
    for name in ("dense", "softmax", "layer_norm", "gelu", "attention"):
        mean, _, variance = run(structure, name, "nan")
        assert np.isnan(mean).any(), name
        assert not (np.isnan(mean) & ~np.isnan(variance)).any(), name


@quickly(mj.Diagonal)
def test_float32_and_gradients(structure, run):
    """Variances of many scales to a hundredth, and finite slopes, also where nothing is random."""
    special = {k: v for k, v in special_rows(structure).items() if k in HUGE or k in GAINS}
    *single, masks = stacked([*special.values()])

    def total(mean, cov, memory, block, mask):
        every = moments(mean, cov, memory, block, mask)
        return loss_of(every[n] for n in every if n not in ("dense", "feed_forward")), every

    gradient = jax.jit(jax.vmap(jax.grad(total, (0, 1, 2, 3), has_aux=True)))
    slopes, every = gradient(*jax.tree.map(np.float32, single), masks)
    assert {leaf.dtype for leaf in jax.tree.leaves((slopes, every))} == {jnp.dtype("float32")}
    assert all(np.isfinite(slope).all() for slope in jax.tree.leaves(slopes))
    assert not slopes[2][[*special].index("no key")].any()  # of a memory that no query sees
    for name, (_, cov) in every.items():
        variances = np.asarray(jax.vmap(lambda c: c.variance())(cov))
        for row, got in zip(special, variances, strict=True):
            assert_variance(got, run(structure, name, row)[2], row)


@quickly(mj.Diagonal)
def test_one_token_of_two_features_in_order_1_by_any_family(structure):
    """In float32; the input may be certain, and its features equal."""
    point, one, two, three, four = (
        random_block(key, 2, 3, 1.0, f) for key, f in zip(KEYS, KERNEL_FAMILIES, strict=False)
    )
    block = dataclasses.replace(
        point,
        attention=mj.AttentionParams(
            one.attention.query, two.attention.key, three.attention.value, four.attention.output
        ),
        feed_forward=mj.FeedForwardParams(four.feed_forward.hidden, three.feed_forward.output),
        norm1=four.norm1,
    )
    block = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), block)
    means = np.float32(2 * np.random.default_rng(0).normal(size=(5, 1, 2)))
    means[0], means[1], spreads = 0, 1, np.float32([0, 1, 0.1, 1, 10])

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None))
    def run(mean, spread, mask):
        cov = structure.independent(jnp.broadcast_to(spread**2, mean.shape))
        found = moments(mean, cov, mean, block, mask)
        return {name: (m, c.to_dense(), c.variance()) for name, (m, c) in found.items()}

    for name, found in run(means, spreads, np.ones((1, 1), bool)).items():
        assert {array.dtype for array in found} == {jnp.dtype("float32")}, name
        assert_semidefinite(*found, 1e-5)


NORMS = {  # beside `layer_norm` and with it, of gains that differ or not
    "rms_norm": lambda m, c, given: mj.layer_norm(m, c, given.block.norm1, centres=False),
    "layer_norm, no gain": lambda m, c, given: mj.layer_norm(m, c, mj.NormParams()),
    "rms_norm, no gain": lambda m, c, given: mj.layer_norm(m, c, mj.NormParams(), centres=False),
}
GAINED = ("layer_norm", "rms_norm")


def test_results_in_separable_agree_in_what_they_hold():
    """G_tt is a token's variance in sum and tr C = p^T G p, also of tokens that share little noise.

    A gain of every feature keeps the covariance of the pooled sum exact, and G that of the family, from
    which a normalised token's variances differ.
    """
    random, (t, d) = np.random.default_rng(3), SHAPE
    alone = [mj.Separable.independent(random.uniform(0.01, 1, SHAPE)) for _ in range(6)]
    common = [mj.Separable.project(random_dense(key, SHAPE, 0.3)) for key in KEYS[2:]]
    covs = [member(c) for c in [*common, *(a.add(c) for a, c in zip(alone, common, strict=True))]]
    first = np.arange(t) < REAL
    masks = [np.broadcast_to(m, (t, t)) for m in (EVERY_KEY, np.tril(EVERY_KEY), first)] * 4
    pools = [np.ones(t), np.ones(t), first.astype(float)] * 4

    @jax.jit
    @jax.vmap
    def every(mean, cov, pool, mask):
        memory = 0.5 * mean, mj.Separable.independent(0.01 + 0.1 * cov.variance())
        other = mean.T, mj.Separable.independent(cov.variance().T)
        given = Given(BLOCK, other, memory, mask, mask)
        layers = {**LAYERS, **NORMS}
        return {name: layer(mean, cov.pooled(pool), given)[1] for name, layer in layers.items()}

    means = random.normal(size=(len(covs), t, d))
    for name, cov in every(means, stacked(covs), np.stack(pools), np.stack(masks)).items():
        held, kept = np.einsum("ntt->nt", cov.tokens), np.sum(cov.variances, axis=2)
        if name not in GAINED:
            np.testing.assert_allclose(held, kept, rtol=1e-6, err_msg=name)
        pooled = np.einsum("nt,nts,ns->n", cov.pool, cov.tokens, cov.pool)
        trace = np.einsum("ndd->n", cov.features)
        np.testing.assert_allclose(trace, pooled, rtol=1e-6, err_msg=name)
        mj.Separable(*jax.tree.leaves(cov))  # the constructor takes it
