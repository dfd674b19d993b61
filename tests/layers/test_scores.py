"""Scores of attention with a scale, a bias, a random bias and a cap, in every structure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax import expectations
from moment_jax.covariance import Full
from moment_jax.layers.rules import ScoreNoise
from moment_jax.layers.sublayers import attention_with_carry
from moment_jax.posterior import Factorized
from tests.builders import ALL_STRUCTURES, Pairs, assert_close, random_block, random_cov

KEYS = jax.random.split(jax.random.key(3), 6)
T, D, H = 4, 6, 2
MEAN = jax.random.normal(KEYS[0], (T, D))
PARAMS = random_block(KEYS[1], D, 8, 0.3).attention
SCALE = 0.5 + jax.random.uniform(KEYS[2], (H, T, T))
BIAS = jax.random.normal(KEYS[3], (H, T, T))
PLACES = np.arange(T)[:, None] - np.arange(T) + T - 1 + (2 * T - 1) * np.arange(H)[:, None, None]
STRUCTURES = [*ALL_STRUCTURES, Pairs]


def cap(score):
    return 1.5 * jnp.tanh(score / 1.5)


def table(variance):
    return (ScoreNoise(jnp.full(H * (2 * T - 1), variance), PLACES, jnp.ones((1, 1, 1))),)


def attend(cov, mask=None, params=PARAMS, **scores):
    mean, out, _ = attention_with_carry(MEAN, cov, params, H, mask, **scores)
    return mean, out.to_dense()


def network(kernels, x=MEAN, scale=SCALE, bias=BIAS, function=cap):
    """The layer of arrays: (kernel, bias) of query, key, value and output."""
    q, k, v = ((x @ w + b[None]).reshape(len(x), H, -1).swapaxes(0, 1) for w, b in kernels[:3])
    scores = function(scale * (q @ k.swapaxes(1, 2)) / q.shape[2] ** 0.5) + bias
    mixed = jax.nn.softmax(scores, axis=-1) @ v
    return mixed.swapaxes(0, 1).reshape(x.shape) @ kernels[3][0] + kernels[3][1][None]


LAYERS = PARAMS.query, PARAMS.key, PARAMS.value, PARAMS.output
CERTAIN = mj.AttentionParams(
    *(mj.DenseParams(*(mj.posterior.Point(p.mean) for p in (x.kernel, x.bias))) for x in LAYERS)
)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_where_nothing_is_random_the_mean_is_the_networks(structure):
    cov = structure.zeros(MEAN.shape, jnp.float64)
    scores = {"scale": SCALE, "bias": BIAS, "noise": table(0.0), "cap": expectations.of(cap)}
    mean, found = jax.jit(lambda: attend(cov, params=CERTAIN, **scores))()
    assert_close(mean, network([(p.kernel.mean, p.bias.mean) for p in LAYERS]))
    assert not found.any()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_special_cases_agree(structure):
    """Each pair is one layer said in two ways."""
    cov, keep = random_cov(KEYS[4], structure, MEAN.shape), jnp.arange(T) != 2
    hidden = jnp.where(keep, 0.0, -jnp.inf)[None, None]
    mask = jnp.broadcast_to(keep[None], (T, T))

    def identity(mean, variance):
        ones = jnp.ones_like(mean)
        return expectations.ElementwiseMoments(mean, variance, ones, 0 * ones)

    @jax.jit
    def pairs(cov):
        plain = attend(cov)
        return {
            "a scale of one": (attend(cov, scale=jnp.ones((1, 1, 1))), plain),
            "a bias of each query": (attend(cov, bias=BIAS[:, :, :1]), plain),
            "a certain table": (attend(cov, noise=table(0.0)), plain),
            "a cap that does not bend": (attend(cov, cap=identity), plain),
            "one row of a mask for all queries": (attend(cov, mask[:1]), attend(cov, mask)),
            "a bias of -inf": (attend(cov, bias=hidden), attend(cov, mask)),
            "a bias of -inf after a cap": (
                attend(cov, bias=hidden, cap=expectations.of(cap)),
                attend(cov, mask, cap=expectations.of(cap)),
            ),
            "a scale of queries": (
                attend(cov, scale=SCALE[:, :, :1]),
                attend(cov, scale=jnp.broadcast_to(SCALE[:, :, :1], SCALE.shape)),
            ),
        }

    for name, (one, other) in pairs(cov).items():
        for found, expected in zip(one, other, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9, err_msg=name)


def test_a_bias_is_batched_and_has_a_derivative():
    def total(bias):
        mean, dense = attend(Full.zeros(MEAN.shape), bias=bias)
        return jnp.sum(mean**2) + jnp.einsum("tdtd->", dense)

    slope = jax.jit(jax.vmap(jax.grad(total)))(jnp.stack([BIAS, 2 * BIAS]))
    step = 1e-5 * jnp.ones((T, T)).at[:, 0].set(2)
    change = (total(BIAS + step[None]) - total(BIAS - step[None])) / 2
    assert_close(change, jnp.sum(slope[0] * step[None]), 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scores",
    [
        {"scale": SCALE, "bias": BIAS},
        {"noise": 0.5},
        {"cap": cap},
        {"cap": lambda z: jnp.clip(z, -1, 1)},
    ],
    ids=["scale and bias", "table", "tanh", "clip"],
)
def test_the_pooled_sd_is_that_of_sampled_networks(scores):
    """Of 4,000 draws, whose own error is .011."""
    function, spread = scores.get("cap", lambda score: score), scores.get("noise", 0.0)
    scale, bias = scores.get("scale", jnp.ones(())), scores.get("bias", jnp.zeros(()))

    def draw(key):
        keys = iter(jax.random.split(key, 10))

        def of(belief):
            z = jax.random.normal(next(keys), belief.shape)
            return belief.mean + jnp.sqrt(belief.variance) * z

        kernels = [(of(p.kernel), of(p.bias)) for p in LAYERS]
        entries = spread**0.5 * jax.random.normal(next(keys), (H * (2 * T - 1),))
        return jnp.mean(network(kernels, MEAN, scale, bias + entries[PLACES], function), axis=0)

    assert isinstance(PARAMS.query.kernel, Factorized)
    truth = np.std(jax.jit(jax.vmap(draw))(jax.random.split(KEYS[5], 4000)), axis=0)
    given = {name: value for name, value in scores.items() if name in ("scale", "bias")}
    given |= {"noise": table(spread)} if "noise" in scores else {}
    given |= {"cap": expectations.of(function)} if "cap" in scores else {}
    for structure, most in ((mj.Separable, 0.06), (Full, 0.03)):
        cov = structure.zeros(MEAN.shape, jnp.float64)
        dense = jax.jit(lambda cov=cov: attend(cov, **given))()[1]
        ratio = np.sqrt(np.einsum("tdsd->d", dense)) / T / truth
        assert np.mean(np.abs(ratio - 1)) < most, (structure, ratio)
