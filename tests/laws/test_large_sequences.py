"""Scans over heads and blocks, and remat, change the program but not its result."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import assert_close, filled, random_block, random_cov, tiny_vision

pytestmark = pytest.mark.slow

mix = importlib.import_module("moment_jax.layers.heads")
KEYS = jax.random.split(jax.random.key(8), 3)
SHAPE = (5, 6)
BLOCK = random_block(KEYS[0], SHAPE[1], 8, 0.3)
MEAN = jax.random.normal(KEYS[1], SHAPE)


def double(network):
    """The network in float64."""
    arrays = nnx.to_pure_dict(nnx.state(network, nnx.Param))
    return filled(network, jax.tree.map(lambda a: a.astype(jnp.float64), arrays))


@pytest.mark.parametrize(
    ("structure", "mask"),
    [
        (mj.Diagonal, jnp.tril(jnp.ones((5, 5), bool))),
        (mj.Separable, jnp.tril(jnp.ones((5, 5), bool))),
    ],
)
def test_heads_one_after_another(monkeypatch: pytest.MonkeyPatch, structure, mask):
    cov = random_cov(KEYS[2], structure, SHAPE, 0.3)

    def total(mean):
        out, out_cov = mj.attention(mean, cov, BLOCK.attention, num_heads=2, mask=mask)
        return jnp.sum(out**2) + jnp.sum(out_cov.to_dense() ** 2), (out, out_cov.to_dense())

    def traced():
        return jax.jit(jax.value_and_grad(lambda x: total(x), has_aux=True)).trace(MEAN)

    (_, together), gradient = traced().lower().compile()(MEAN)
    monkeypatch.setattr(mix, "_MANY_SCORES", 0)
    by_scan = traced()
    assert "scan" in str(by_scan.jaxpr)
    (_, alone), gradient_alone = by_scan.lower().compile()(MEAN)
    assert_close(alone[0], together[0])
    assert_close(alone[1], together[1])
    assert_close(gradient_alone, gradient, 1e-9)


def test_scanned_blocks_are_a_loop_of_blocks():
    sizes, options = (6, 2), {"hidden_features": 8, "rngs": nnx.Rngs(0)}
    model = mj.Bayesian(double(mj.nn.Encoder(2, *sizes, scan=True, **options)), batch_axes=0)

    def alone(i):
        beliefs = jax.tree.map(lambda a: a[i], model.beliefs["blocks"])
        return mj.Bayesian(mj.nn.EncoderBlock(*sizes, **options), beliefs=beliefs, batch_axes=0)

    first, second = map(alone, range(2))
    with jax.numpy_rank_promotion("allow"):  # Flax's layers promote
        traced = jax.jit(model).trace(MEAN)
        expected_mean, expected = jax.jit(lambda x: second(first(x)))(MEAN)
    assert "scan" in str(traced.jaxpr)
    mean, cov = traced.lower().compile()(MEAN)
    assert_close(mean, expected_mean)
    assert_close(cov.to_dense(), expected.to_dense())


def test_remat_reaches_the_encoder_and_changes_no_gradient():
    def gradient(remat: bool):
        network = double(tiny_vision(num_blocks=2, remat=remat))
        model = mj.Bayesian(network, structure=mj.Diagonal, batch_axes=0)

        def total(x):
            moments = model(x)
            return jnp.sum(moments.mean**2) + jnp.sum(moments.variance**2)

        image = jnp.linspace(0.0, 1.0, 16).reshape(4, 4)
        with jax.numpy_rank_promotion("allow"):
            traced = jax.jit(jax.grad(total)).trace(image)
        return str(traced.jaxpr), traced.lower().compile()(image)

    (with_remat, slopes), (without, expected) = gradient(True), gradient(False)
    assert " remat" in with_remat or " checkpoint" in with_remat
    assert " remat" not in without
    assert " checkpoint" not in without
    assert_close(slopes, expected)
    assert expected.any()
