"""Laws of the blocks, by one program of a pre-norm and one of a post-norm block for each structure.

A row of its layers.batch is an input; its results are moments and gradients, after one block or two.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.layers import rules
from tests import builders
from tests.builders import (
    ALL_STRUCTURES,
    assert_close,
    assert_semidefinite,
    first_tokens,
    random_block,
    random_cov,
    random_dense,
    scaled,
    stacked,
)
from tests.laws import test_layers as layers
from tests.laws.test_layers import EVERY_KEY, GAINS, REAL, SHAPE

SEEN = 2  # later tokens change
KEYS = jax.random.split(jax.random.key(4), 6)
BLOCK = random_block(KEYS[0], SHAPE[1], 8, 0.3)
MEAN = np.asarray(jax.random.normal(KEYS[1], SHAPE))
CAUSAL = np.tril(EVERY_KEY)


def block(mean, cov, params, mask, norm_first):
    return mj.encoder_block(mean, cov, params, num_heads=2, norm_first=norm_first, mask=mask)


def changed(mean, noise):
    """The same with other tokens after the first `SEEN`."""
    later = np.arange(len(mean))[:, None] >= SEEN
    return np.where(later, 5 - 3 * mean, mean), np.where(later, 30 * noise, noise)


def special_rows(structure):
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
        params = scaled(layers.SURE, gain if of == "both" else 1)
        given[of, gain] = gain * MEAN, quiet, params, EVERY_KEY, False
    zero = structure.zeros(SHAPE, jnp.float64)
    given["certain"] = MEAN, zero, scaled(layers.SURE, 3), EVERY_KEY, False
    given["huge scores"] = 1e4 * MEAN, zero, scaled(layers.SURE, 3), EVERY_KEY, False
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
    return layers.loss_of([(mean, cov)]), (mean, cov.to_dense(), cov.variance(), cov.token_gram())


@pytest.fixture(scope="module")
def run():
    """Results by row: gradients, mean, dense covariance, variance and token Gram matrix."""

    @functools.cache
    def of(structure, norm_first):
        def random(means, covs, masks):
            return means, covs, stacked([BLOCK] * layers.COUNT), masks, np.zeros(layers.COUNT, bool)

        given, places = layers.batch(structure, special_rows(structure), random)
        gradient = jax.grad(partial(total, norm_first=norm_first), (0, 1, 2), has_aux=True)
        slopes, found = jax.tree.map(np.asarray, jax.jit(jax.vmap(gradient))(*given))
        return slopes, found, places

    def part(structure, norm_first, row):
        slopes, found, places = of(structure, norm_first)
        return jax.tree.map(lambda leaf: leaf[places[row]], (slopes, *found))

    return part


# Post-norm has no branch of a structure's own.
SLOW = [(mj.Separable, True), (mj.Full, True), (mj.Diagonal, False)]
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
        return layers.loss_of([(mean, cov)]), cov.variance()

    single = jax.tree.map(np.float32, stacked([row[:3] for row in special.values()]))
    slopes, variances = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2), has_aux=True)))(*single)
    assert {leaf.dtype for leaf in jax.tree.leaves((slopes, variances))} == {jnp.dtype("float32")}
    assert all(np.isfinite(slope).all() for slope in jax.tree.leaves(slopes))
    for row, got in zip(special, np.asarray(variances), strict=True):
        layers.assert_variance(got, run(structure, norm_first, row)[3], row)


# `Separable` restores positive semidefiniteness in layers of few features only.
WIDE = 14
MEMORY = jax.random.normal(KEYS[4], (5, WIDE))
DECODER = builders.decoder_of(random_block(KEYS[0], WIDE, 8, 0.5))


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
    attend = functools.partial(mj.attention, num_heads=2, mask=CAUSAL)
    run = jax.jit(lambda cov: attend(mean, cov, params)[1].variance()[1:])
    separable, full = (run(s.independent(noise)) for s in (mj.Separable, mj.Full))
    assert 0.5 < jnp.mean(separable) / jnp.mean(full) < 2


# Post-norm has no branch of a structure's own.
@pytest.mark.parametrize(
    ("structure", "norm_first"),
    [
        (mj.Diagonal, False),
        *(pytest.param(s, True, marks=pytest.mark.slow) for s in ALL_STRUCTURES),
    ],
)
def test_a_certain_decoder_is_the_plain_one_and_one_of_flax_layers(structure, norm_first):
    """Its parts are those of an encoder block."""
    keys = jax.random.split(jax.random.key(12), 4)
    x, memory = (jax.random.normal(key, (n, 4)) for key, n in zip(keys, (3, 4), strict=False))
    params = builders.decoder_of(
        *(random_block(key, 4, 6, 0, mj.posterior.Point) for key in keys[2:])
    )
    options = {"norm_first": norm_first, "mask": np.tri(3, dtype=bool)}

    def of_layers(x, arrays):
        both = arrays.self_attention, arrays.cross_attention
        attend, look = (builders.plain_attention(p, 2) for p in both)
        hidden, output = map(
            builders.plain_linear, (arrays.feed_forward.hidden, arrays.feed_forward.output)
        )
        branches = (
            lambda y: attend(y, mask=options["mask"]),
            lambda y: look(y, memory, memory),
            lambda y: output(jax.nn.relu(hidden(y))),
        )
        norms = map(builders.plain_norm, (arrays.norm1, arrays.norm2, arrays.norm3))
        for norm, branch in zip(norms, branches, strict=True):
            x = x + branch(norm(x)) if norm_first else norm(x + branch(x))
        return x

    @jax.jit
    def every(arrays):
        cov, memory_cov = (structure.zeros(a.shape, a.dtype) for a in (x, memory))
        mean, out = mj.decoder_block(x, cov, memory, memory_cov, params, num_heads=2, **options)
        network = builders.plain_block(arrays, 2, norm_first=norm_first)(x, memory, options["mask"])
        return mean, out.variance(), network, of_layers(x, arrays)

    with jax.numpy_rank_promotion("allow"):
        arrays = mj.posterior.sample_params(params, keys[0])
        mean, variance, network, plain = every(arrays)
    assert_close(network, plain)
    # jax.nn.dot_product_attention takes its softmax in float32, whatever the inputs.
    assert_close(mean, plain, 1e-6)
    assert not variance.any()


@pytest.mark.parametrize(
    "structure", [mj.Diagonal, pytest.param(mj.Separable, marks=pytest.mark.slow)]
)
def test_heads_one_after_another_change_nothing(monkeypatch, structure):
    """As of large sequences. Of loops over blocks, see test_loops.py."""
    cov = random_cov(KEYS[2], structure, SHAPE, 0.3)

    def total(mean):
        out, own = mj.attention(mean, cov, BLOCK.attention, num_heads=2, mask=CAUSAL)
        return jnp.sum(out**2) + jnp.sum(own.to_dense() ** 2), (out, own.to_dense())

    def traced():
        return jax.jit(jax.value_and_grad(lambda x: total(x), has_aux=True)).trace(MEAN)

    (_, together), gradient = traced().lower().compile()(MEAN)
    monkeypatch.setattr(rules, "_MANY_SCORES", 0)
    by_scan = traced()
    assert "scan" in str(by_scan.jaxpr)
    (_, alone), gradient_alone = by_scan.lower().compile()(MEAN)
    jax.tree.map(assert_close, alone, together)
    assert_close(gradient_alone, gradient, 1e-9)


@pytest.mark.slow
def test_a_random_block_is_that_of_sampled_networks():
    """Tokens share the noise of weights, so `Diagonal` has no band; of `Full`, see tests/reference."""
    options = {"norm_first": True, "activation": "gelu", "hidden_features": 32}
    block = mj.nn.EncoderBlock(16, 2, **options, rngs=nnx.Rngs(0))
    common, own = (jax.random.normal(KEYS[i], (n, 16), jnp.float32) for i, n in ((0, 1), (1, 16)))
    with jax.numpy_rank_promotion("allow"):
        found = mj.Bayesian(block).check((0.8 * common + 0.6 * own)[None], samples=4000)
    assert 0.97 < found.sd_ratio < 1.03, found
    # The sampled mean's own error is 0.8 / sqrt(4000) = 0.013 sd.
    assert found.mean_error < 0.013 + 0.012, found
