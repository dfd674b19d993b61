"""Errors of shape and type are raised while tracing and state the fix."""

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from tests.builders import random_block, random_dense_params

KEY = jax.random.key(3)
MEAN = jnp.ones((3, 4))
COV = mj.Diagonal.zeros((3, 4), jnp.float64)
DENSE = random_dense_params(KEY, mj.posterior.Factorized, (4, 5))
BLOCK = random_block(KEY, 4, 8)


def vector(size):
    return mj.posterior.Point(jnp.ones(size))


def dense(mean=MEAN, cov=COV, params=DENSE):
    return mj.dense(mean, cov, params)


def attention(cov=COV, num_heads=2, **options):
    return mj.attention(MEAN, cov, BLOCK.attention, num_heads=num_heads, **options)


def look(memory, cov, **options):
    return mj.cross_attention(MEAN, COV, memory, cov, BLOCK.attention, num_heads=2, **options)


def encoder(mean=MEAN, **options):
    return mj.encoder_block(mean, COV, BLOCK, **{"num_heads": 2, **options})


def zeros(*shape, structure=mj.Diagonal):
    return structure.zeros(shape)


SHAPES = [
    (lambda: dense(MEAN[None]), "use jax.vmap"),
    (lambda: dense(cov=zeros(2, 4)), "cov.shape == mean"),
    (lambda: dense(MEAN.T, zeros(4, 3)), r"kernel of shape \(3, out\)"),
    (lambda: dense(params=mj.DenseParams(DENSE.kernel, vector(3))), "bias of shape"),
    (lambda: dense(MEAN[:0], zeros(0, 4, structure=mj.Separable)), r"one token.*Got \(0, 4\)"),
    (lambda: dense(cov=jax.tree.map(lambda v: v[..., None], COV)), "in_axes=None"),
    (lambda: jax.vmap(dense, (0, 0, None))(jnp.ones((3, 3, 4)), COV, DENSE), "in_axes=None"),
    (lambda: mj.matmul(MEAN, COV, MEAN, COV), "as many columns"),
    (lambda: mj.layer_norm(MEAN, COV, mj.NormParams(vector(3))), "scale of shape"),
    (lambda: look(MEAN[None], COV), "cross_attention's memory"),
    (lambda: look(MEAN[:, :3], zeros(3, 3)), r"kernel of shape \(3, out\)"),
    (lambda: look(MEAN[:2], zeros(2, 4), mask=jnp.ones((3, 3), bool)), r"\(3, 2\)"),
    (lambda: attention(num_heads=3), "a whole number, to divide"),
    (lambda: attention(mask=jnp.ones((3, 3))), "boolean mask"),
    (lambda: attention(zeros(3, 4, structure=mj.Separable), mask=[[True]]), "Got list"),
    (lambda: encoder(MEAN[0]), "encoder_block"),
    (lambda: encoder(num_heads=0), "num_heads=0"),
    (lambda: encoder(num_heads=2.0), "a whole number, .*Got num_heads=2.0"),
    (lambda: encoder(num_heads="2"), "a whole number, .*Got num_heads='2'"),
    (lambda: encoder(epsilon=-1e-3, norm_first=True), "epsilon >= 0. Got -0.001"),
    (lambda: encoder(activation="swish"), "'relu', 'gelu'. Got 'swish'"),
    (lambda: mj.activation(MEAN, COV, "tanh"), "such as jnp.tanh"),
    (lambda: mj.nn.MLP([3], rngs=None), r"\[8, 50, 1\]"),
]
TYPES = [
    (lambda: dense(cov=jnp.ones((3, 4))), "Use one of"),
    (lambda: dense([[1.0]]), "Got list. Use jnp.asarray"),
    (lambda: dense(params=mj.DenseParams(jnp.ones((4, 5)))), r"Point\(kernel\)"),
    (lambda: look(MEAN, zeros(3, 4, structure=mj.Full)), "in one structure"),
    (lambda: dense(MEAN.astype(int)), r"int64.*astype\(jnp.float32\)"),
    (lambda: mj.activation(MEAN > 0, COV, "relu"), r"bool.*astype\(jnp.float32\)"),
    (lambda: encoder(activation=mj.activation), "a function of a scalar"),
    (lambda: encoder(activation=lambda x: jnp.ones(2)), "Give a function, such as jnp.tanh"),
]


@pytest.mark.parametrize(
    ("call", "words", "error"),
    [(*case, ValueError) for case in SHAPES] + [(*case, TypeError) for case in TYPES],
)
def test_message(call, words, error):
    with pytest.raises(error, match=words):
        call()
    with pytest.raises(error, match=words):
        jax.jit(call)()
