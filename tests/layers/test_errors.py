"""Errors of shape and type are raised while tracing and state the fix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import random_block, random_dense_params

KEY = jax.random.key(3)
MEAN = jnp.ones((3, 4))
COV = mj.Diagonal.zeros((3, 4), jnp.float64)
DENSE = random_dense_params(KEY, mj.posterior.Factorized, (4, 5))
BLOCK = random_block(KEY, 4, 8)


def encoder(**options):
    return mj.encoder_block(MEAN, COV, BLOCK, **{"num_heads": 2, **options})


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: mj.dense(MEAN[None], COV, DENSE), ValueError, "use jax.vmap"),
        (lambda: mj.dense(MEAN, mj.Diagonal.zeros((2, 4)), DENSE), ValueError, "cov.shape == mean"),
        (lambda: mj.dense(MEAN, jnp.ones((3, 4)), DENSE), TypeError, "Use one of"),
        (lambda: mj.dense(MEAN.T, mj.Diagonal.zeros((4, 3)), DENSE), ValueError, "in == 3"),
        (
            lambda: mj.dense(MEAN, COV, mj.DenseParams(jnp.ones((4, 5)))),
            TypeError,
            r"Point\(kernel\)",
        ),
        (
            lambda: mj.dense(
                MEAN, COV, mj.DenseParams(DENSE.kernel, mj.posterior.Point(jnp.ones(3)))
            ),
            ValueError,
            "bias of shape",
        ),
        (lambda: mj.matmul(MEAN, COV, MEAN, COV), ValueError, "as many columns"),
        (lambda: mj.softmax(MEAN, COV, order=3), ValueError, "order=1"),
        (lambda: mj.softmax(MEAN, COV, mask=jnp.ones(4, bool)), ValueError, "mask"),
        (
            lambda: mj.layer_norm(MEAN, COV, mj.NormParams(mj.posterior.Point(jnp.ones(3)))),
            ValueError,
            "scale of shape",
        ),
        (lambda: mj.mean_pool(MEAN, COV, jnp.ones(4, bool)), ValueError, "mask of shape"),
        (
            lambda: mj.cross_attention(
                MEAN, COV, MEAN, mj.TokenBlock.zeros((3, 4)), BLOCK.attention, num_heads=2
            ),
            TypeError,
            "in one structure",
        ),
        (
            lambda: mj.cross_attention(MEAN, COV, MEAN[None], COV, BLOCK.attention, num_heads=2),
            ValueError,
            "cross_attention's memory",
        ),
        (
            lambda: mj.cross_attention(
                MEAN, COV, MEAN[:, :3], mj.Diagonal.zeros((3, 3)), BLOCK.attention, num_heads=2
            ),
            ValueError,
            "in == 3",
        ),
        (
            lambda: mj.cross_attention(
                MEAN,
                COV,
                jnp.ones((2, 4)),
                mj.Diagonal.zeros((2, 4)),
                BLOCK.attention,
                num_heads=2,
                mask=jnp.ones((3, 3), bool),
            ),
            ValueError,
            r"\(3, 2\)",
        ),
        (
            lambda: mj.attention(MEAN, COV, BLOCK.attention, num_heads=3),
            ValueError,
            "num_heads to divide",
        ),
        (
            lambda: mj.attention(MEAN, COV, BLOCK.attention, num_heads=2, mask=jnp.ones((3, 3))),
            ValueError,
            "boolean mask",
        ),
        (
            lambda: mj.encoder_block(MEAN[0], COV, BLOCK, num_heads=2),
            ValueError,
            "encoder_block",
        ),
        (lambda: mj.mean_pool(MEAN.astype(int), COV), TypeError, r"int64.*astype\(jnp.float32\)"),
        (lambda: mj.relu(MEAN > 0, COV), TypeError, r"bool.*astype\(jnp.float32\)"),
        (lambda: mj.dense([[1.0]], COV, DENSE), TypeError, "Got list. Use jnp.asarray"),
        (lambda: mj.mean_pool(MEAN, COV, jnp.ones(3)), ValueError, "boolean mask"),
        (lambda: mj.mean_pool(MEAN, COV, [True] * 3), ValueError, "Got list"),
        (
            lambda: mj.attention(
                MEAN, mj.Separable.zeros((3, 4)), BLOCK.attention, num_heads=2, mask=[[True]]
            ),
            ValueError,
            "Got list",
        ),
        (
            lambda: mj.nn.Encoder(1, 4, 2, rngs=nnx.Rngs(0))(MEAN, valid=[True] * 3),
            ValueError,
            "jnp.arange.*",
        ),
        (lambda: mj.softmax(MEAN, COV, mask=jnp.zeros((3, 4))), ValueError, "boolean mask"),
        (
            lambda: mj.dense(MEAN[:0], mj.Separable.zeros((0, 4)), DENSE),
            ValueError,
            r"at least one token.*Got \(0, 4\)",
        ),
        (
            lambda: jax.vmap(mj.dense, (0, 0, None))(jnp.ones((3, 3, 4)), COV, DENSE),
            ValueError,
            "in_axes=None",
        ),
        (
            lambda: mj.dense(MEAN, jax.tree.map(lambda v: v[..., None], COV), DENSE),
            ValueError,
            "in_axes=None",
        ),
        (lambda: encoder(num_heads=2.0), TypeError, "a whole number. Got 2.0"),
        (lambda: encoder(num_heads="2"), TypeError, "a whole number. Got '2'"),
        (lambda: encoder(num_heads=0), ValueError, "num_heads=0"),
        (lambda: encoder(activation="gelu"), TypeError, "Got 'gelu'. Use mj.gelu"),
        (lambda: encoder(activation=jax.nn.gelu), TypeError, "gelu.*Use mj.gelu"),
        (lambda: encoder(activation=jax.nn.relu), TypeError, "relu.*Use mj.gelu"),
        (lambda: encoder(activation=lambda m, c: m), TypeError, "Use mj.gelu"),
        (lambda: mj.activation(MEAN, COV, "gelu"), TypeError, "of a scalar. Got 'gelu'"),
        (lambda: mj.activation(MEAN, COV, mj.gelu), TypeError, r"mj.gelu\(mean, cov\)"),
        (lambda: encoder(epsilon=-1e-3), ValueError, "epsilon >= 0. Got -0.001"),
        (lambda: mj.nn.Dense(3, 2, rngs=None, structure="Full"), TypeError, "mj.Separable"),
        (lambda: mj.nn.MLP([3], rngs=None), ValueError, r"\[8, 50, 1\]"),
    ],
)
def test_message(call, error, words):
    with pytest.raises(error, match=words):
        call()
    with pytest.raises(error, match=words):
        jax.jit(call)()
