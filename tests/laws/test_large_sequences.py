"""What changes with many tokens or many blocks is the program, not its result."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import assert_close, random_block, random_cov, tiny_vision

pytestmark = pytest.mark.slow

mix = importlib.import_module("moment_jax.layers.attention.mix")
KEYS = jax.random.split(jax.random.key(8), 3)
SHAPE = (5, 6)
BLOCK = random_block(KEYS[0], SHAPE[1], 8, 0.3)
MEAN = jax.random.normal(KEYS[1], SHAPE)


@pytest.mark.parametrize(
    ("structure", "mask"),
    [
        (mj.Diagonal, jnp.tril(jnp.ones((5, 5), bool))),
        (mj.TokenCorrelated, None),
        (mj.Separable, None),
        (mj.Separable, jnp.tril(jnp.ones((5, 5), bool))),
    ],
)
def test_heads_one_after_another(monkeypatch: pytest.MonkeyPatch, structure, mask):
    cov = random_cov(KEYS[2], structure, SHAPE, 0.3)

    def total(mean):
        out, out_cov = mj.attention(mean, cov, BLOCK.attention, num_heads=2, mask=mask)
        return jnp.sum(out**2) + jnp.sum(out_cov.to_dense() ** 2), (out, out_cov.to_dense())

    (_, together), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(MEAN)
    monkeypatch.setattr(mix, "_MANY_SCORES", 0)
    assert "scan" in str(jax.make_jaxpr(lambda mean: total(mean)[0])(MEAN))
    (_, alone), gradient_alone = jax.jit(jax.value_and_grad(total, has_aux=True))(MEAN)
    assert_close(alone[0], together[0])
    assert_close(alone[1], together[1])
    assert_close(gradient_alone, gradient, 1e-9)


@pytest.mark.parametrize("structure", [mj.Diagonal, mj.Separable])
def test_scanned_blocks_are_a_loop_of_blocks(structure: type[mj.Covariance]):
    encoder = mj.nn.Encoder(
        2, 6, 2, hidden_features=8, rngs=nnx.Rngs(0), structure=structure, dtype=jnp.float64
    )

    @jax.jit
    def loop(mean):
        cov = structure.zeros(SHAPE, mean.dtype)
        for params in encoder.params[0]:
            mean, cov = mj.encoder_block(mean, cov, params, num_heads=2)
        return mean, cov.to_dense()

    mean, cov = jax.jit(lambda x: encoder(x))(MEAN)
    expected_mean, expected = loop(MEAN)
    assert_close(mean, expected_mean)
    assert_close(cov.to_dense(), expected)


def test_remat_reaches_the_encoder():
    def program(remat: bool) -> str:
        model = tiny_vision(num_blocks=2, remat=remat, structure=mj.Diagonal)
        return str(jax.make_jaxpr(lambda x: model(x)[0])(jnp.ones((4, 4))))

    assert " remat" in program(True) or " checkpoint" in program(True)
    assert " remat" not in program(False)
    assert " checkpoint" not in program(False)


def test_remat_changes_no_gradient():
    def gradient(remat: bool):
        encoder = mj.nn.Encoder(
            2,
            6,
            2,
            hidden_features=8,
            rngs=nnx.Rngs(0),
            structure=mj.Diagonal,
            dtype=jnp.float64,
            remat=remat,
        )
        return jax.jit(jax.grad(lambda x: sum(jnp.sum(part**2) for part in _leaves(encoder(x)))))(
            MEAN
        )

    assert_close(gradient(True), gradient(False))


def _leaves(moments):
    mean, cov = moments
    return mean, cov.variance()
