"""Masked heads are pruned heads, and importance is what the ELBO itself says."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import KERNEL_FAMILIES, assert_close, random_block, tiny_vision

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")

from experiments.brownian.pruning import mask_heads, prune_heads

from experiments.brownian.heads import head_curve, head_importance, head_predictions, head_signal

pytestmark = pytest.mark.slow

IMAGES = jax.random.normal(jax.random.key(1), (3, 4, 4))
LABELS = jnp.array([0, 2, 1])
KEPT = np.array([[True, True], [False, True]])
ALL, ONE = np.ones(4, bool), KEPT.ravel()
MASKS = np.stack([ALL, ONE, ~ONE, ~ALL, ALL])  # as many as importance and curve take: one program


def stirred(model):
    """Beliefs that start uncorrelated, no longer so."""
    for _, leaf in nnx.iter_graph(model):
        if isinstance(leaf, mj.nn.VariationalScale):
            noise = jax.random.normal(jax.random.key(leaf.size), leaf.shape, leaf.dtype)
            leaf.set_value(leaf[...] + 0.1 * noise)
    return model


def vision(**settings):
    own = {"dtype": jnp.float64, "relative_scale": 0.4, "structure": mj.Diagonal}
    return stirred(tiny_vision(num_blocks=2, **own, **settings))


@pytest.fixture(scope="module")
def model():
    return vision()


@pytest.fixture(scope="module")
def smaller(model):
    return prune_heads(model, KEPT)


@nnx.jit
def moments(model, images):
    return model(images)


def layers(family):
    """An attention layer with one of its two heads pruned, and the same with it masked."""
    own = {"posterior": family, "dtype": jnp.float64, "relative_scale": 0.4}
    encoder = stirred(mj.nn.Encoder(1, 4, 2, rngs=nnx.Rngs(0), **own))
    smaller = prune_heads(encoder, [[True, False]]).blocks[0]
    assert encoder.blocks[0].num_heads == 2
    assert smaller.sample(jax.random.key(2)).attention.num_heads == smaller.num_heads == 1
    masked = mask_heads(encoder.blocks[0].params.attention, jnp.array([1.0, 0.0]))
    return smaller.params.attention, masked


@jax.jit
def projections(x, params):
    """Moments of queries, keys, values, and of the output of the values alone, in `Full`."""
    start = mj.Full.zeros(x.shape, jnp.float64)
    query, key, value = (mj.dense(x, start, p) for p in (params.query, params.key, params.value))
    return [query, key, value, mj.dense(*value, params.output)]


@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_pruned_projections_are_the_masked_ones(family):
    pruned, masked = (projections(IMAGES[0], params) for params in layers(family))
    for (mean, cov), (whole, whole_cov) in zip(pruned, masked, strict=True):
        n = mean.shape[1]
        assert_close(mean, whole[:, :n])
        assert_close(cov.to_dense(), whole_cov.to_dense()[:, :n, :, :n])
        assert not whole[:, n:].any()
        assert not whole_cov.variance()[:, n:].any()


def test_a_pruned_layer_is_the_masked_one():
    """In a structure that keeps one correlation between tokens for all heads."""
    start = mj.TokenCorrelated.zeros(IMAGES[0].shape, jnp.float64)
    attend = jax.jit(mj.attention, static_argnames="num_heads")
    (mean, cov), (whole, whole_cov) = (
        attend(IMAGES[0], start, params, num_heads=heads)
        for heads, params in zip((1, 2), layers(mj.posterior.FullNormal), strict=True)
    )
    assert_close(mean, whole)
    assert_close(cov.variance(), whole_cov.variance())


def test_a_pruned_module_is_the_masked_one(model, smaller):
    masked = head_predictions(model, IMAGES, MASKS)
    for mine, theirs in zip(moments(smaller, IMAGES), masked, strict=True):
        assert_close(mine, theirs[1])
    for mine, theirs in zip(moments(model, IMAGES), masked, strict=True):
        assert_close(mine, theirs[0])
        assert jnp.max(jnp.abs(mine - theirs[1])) > 1e-3
    with jax.numpy_rank_promotion("allow"):
        assert moments(smaller.sample(jax.random.key(2)), IMAGES).shape == (3, 3)


def test_importance_is_the_change_of_the_elbo(model, smaller):
    found = head_importance(model, IMAGES, LABELS, dataset_size=6, kl_weight=0.3)
    fit = partial(mj.objectives.expected_log_likelihood, mj.objectives.Categorical())

    def bound(model):
        fits = jax.vmap(fit)(LABELS, *moments(model, IMAGES))
        return mj.objectives.elbo(fits, model.kl(), dataset_size=6, kl_weight=0.3)

    assert_close(found.elbo_change[1][0], bound(smaller) - bound(model))
    assert_close(found.kl_saved[1][0], model.kl() - smaller.kl())


def test_signal_of_a_head_is_what_sampling_gives():
    """Mean and variance of what one head adds, within 5 standard errors of 20,000 networks."""
    params = random_block(jax.random.key(0), 4, 4, scale=0.3).attention
    params = mj.AttentionParams(params.query, params.key, params.value,
                                mj.DenseParams(params.output.kernel, None))  # fmt: skip
    tokens = jax.random.normal(jax.random.key(1), (3, 4))
    alone = mask_heads(params, jnp.array([False, True]))

    def output(drawn):
        return mj.nn.plain_attention(_biased(drawn), 2)(tokens)

    def _biased(drawn):
        return mj.AttentionParams(drawn.query, drawn.key, drawn.value,
                                  mj.DenseParams(drawn.output.kernel, jnp.zeros(4)))  # fmt: skip

    with jax.numpy_rank_promotion("allow"):
        truth = mj.monte_carlo(output, alone, jax.random.key(2), 20_000)
    start = mj.Full.zeros(tokens.shape, jnp.float64)
    mean, cov = jax.jit(partial(mj.attention, num_heads=2))(tokens, start, alone)
    assert jnp.all(
        jnp.abs(mean - truth.mean) < 5 * truth.mean_error + 0.01 * truth.standard_deviation
    )
    ratio = jnp.sqrt(cov.variance()) / truth.standard_deviation
    assert jnp.all(jnp.abs(ratio - 1) < 0.1)


def test_signal_falls_with_the_noise_of_the_weights(model):
    before = np.concatenate(head_signal(model, IMAGES))
    noisier = vision()
    for block in noisier.encoder.blocks:
        raw = block.attention.value.kernel.raw["scale"]
        raw.set_value(raw[...] + 1)
    after = np.concatenate(head_signal(noisier, IMAGES))
    assert np.all(after < before)


def test_curve_removes_the_least_worthy_first(model):
    curve = head_curve(model, IMAGES, LABELS, [np.array([2.0, 1.0]), np.array([4.0, 3.0])])
    assert curve.order == [(0, 1), (0, 0), (1, 1), (1, 0)]
    assert curve.kept.tolist() == [4, 3, 2, 1, 0]
    mean, cov = moments(model, IMAGES)
    p = jax.vmap(mj.objectives.class_probabilities)(mean, cov)
    assert_close(curve.nll[0], mj.objectives.negative_log_likelihood(p, LABELS))
    assert np.isfinite(curve.nll).all()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: prune_heads(m, [[True, True], [False, False]]), ValueError, "block 1"),
        (lambda m: prune_heads(m, [[True, True]]), ValueError, r"\[2, 2\]"),
        (lambda m: mask_heads(m.encoder.blocks[0].params.attention, jnp.ones(3)),
         ValueError, "divisor of 4"),
        (lambda m: head_predictions(m.encoder, IMAGES, MASKS), TypeError, "logits"),
        (lambda m: head_predictions(m, IMAGES, KEPT), ValueError, r"\(M, 4\)"),
        (lambda m: head_importance(m, IMAGES, LABELS, dataset_size=2), ValueError, "N=3"),
        (lambda m: head_signal(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), IMAGES), TypeError,
         "blocks"),
    ],
)  # fmt: skip
def test_bad_input(call, error, words, model):
    with pytest.raises(error, match=words):
        call(model)
