"""Run by `test_compiler_fault` in its own process, compiled as users compile it.

Prints, as JSON, the errors of results with constant parameters. Every result is summed over an axis,
which the compiler may fuse with the product before it.
"""

from __future__ import annotations

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moment_jax as mj
from moment_jax.posterior import Factorized, Point
from moment_jax.xla import materialized
from tests.builders import ALL_STRUCTURES, decoder_of, random_block
from tests.transforms import LAYERS, Given

X = jax.random.normal(jax.random.key(0), (64, 64))
STRUCTURES = {of.__name__: of for of in ALL_STRUCTURES}
HEADS = {"num_heads": 2}


@functools.cache
def example_block(features, family):
    with jax.ensure_compile_time_eval():
        return random_block(jax.random.key(0), features, 2 * features, family=family)


def parameters(of, shape, family=Factorized):
    """Constant parameters of a block, and constant covariances of an input of this shape."""
    block = jax.tree.map(
        lambda a: jnp.full(a.shape, 0.01, X.dtype), example_block(shape[1], family)
    )
    square = of.zeros((shape[1], shape[1]))
    return block, of.zeros(shape), of.independent(jnp.full(shape, 0.01)), square


def transforms(of):
    """Every public transform of a sequence x and the parameters above."""

    def layer(name, x, params):
        block, certain, noisy, square = params
        table = block.attention.query.kernel
        cov = certain if name in ("dense", "cross_attention") else noisy
        return LAYERS[name](x, cov, Given(block, (table.mean, square), (x, certain)))

    def embedding(x, params):
        table = params[0].attention.query.kernel
        return mj.embedding(jnp.arange(len(x)) % x.shape[1], table, of)

    def decoder_block(x, params):
        block, certain = params[:2]
        return mj.decoder_block(x, certain, x, certain, decoder_of(block), **HEADS)

    return {
        **{name: functools.partial(layer, name) for name in LAYERS},
        "embedding": embedding,
        "encoder_block": lambda x, params: mj.encoder_block(x, params[1], params[0], **HEADS),
        "decoder_block": decoder_block,
    }


def sums(moments):
    """Sums of mean and variance, one each: a result that is read twice is not fused."""
    mean, cov = moments
    return [jnp.sum(array, axis=0) for array in (mean, cov.variance())]


def error(found, expected):
    """The largest difference, relative to the largest entry of the same array."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, float), np.asarray(b, float)
        difference = np.abs(np.where(np.isfinite(a), a, 1e99) - b)
        worst = max(worst, np.max(difference) / max(np.max(np.abs(b)), 1e-30))
    return float(worst)


def plain(mark):
    """The smallest programs, in plain JAX or with a `materialized` right operand."""
    full, expected = jnp.full((64, 64), 0.01), np.full(64, np.sum(np.asarray(X, float)))
    constant = jax.jit(lambda x: jnp.sum(x @ mark(full), axis=0))
    made = jax.jit(lambda x: jnp.sum(x @ mark(jnp.full((64, 64), x[0, 0])), axis=0))
    return {
        "constant": error(constant(X), expected * float(full[0, 0])),
        "made": error(made(X), expected * float(X[0, 0])),
    }


def of_arguments(fn, x, params):
    """The error of parameters that are constants or made inside `jit`, against arguments."""
    given = params()

    def mixed():
        leaves = enumerate(zip(jax.tree.leaves(given), jax.tree.leaves(params()), strict=True))
        return jax.tree.unflatten(jax.tree.structure(given), [pair[i % 2] for i, pair in leaves])

    return error(jax.jit(lambda x: fn(x, mixed()))(x), jax.jit(fn)(x, given))


def second_derivative(of):
    """The Hessian by the constant mean and variance of a kernel's weights."""

    def total(theta, x, one):
        params = mj.DenseParams(Factorized(one * theta[0], one * theta[1]))
        mean, cov = mj.dense(x, of.zeros(x.shape), params)
        return jnp.sum(mean) ** 2 + jnp.sum(cov.variance() ** 2)

    theta, ones = jnp.array([0.1, 0.01]), (64, 64)
    found = jax.jit(lambda theta, x: jax.hessian(total)(theta, x, jnp.ones(ones)))(theta, X)
    return error(found, jax.jit(jax.hessian(total))(theta, X, jnp.ones(ones)))


def ways_in():
    """Modules, exported programs, batches, and a loss of the result."""
    certain = mj.Separable.zeros(X.shape)
    layer = mj.Bayesian(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer)
    expected = jax.jit(lambda state, x: sums(nnx.merge(graph, state)(x[None])))(state, X)
    exported = jax.export.export(jax.jit(lambda x: sums(nnx.merge(graph, state)(x[None]))))(X)
    random = Factorized(jnp.full((64, 64), 0.01), jnp.full((64, 64), 0.01))
    point = Point(jnp.full((64, 64), 0.1))
    values = mj.AttentionParams(*map(mj.DenseParams, (point, point, random, point)))

    def attention(x, params):
        pair = jnp.stack([x, 2 * x])
        return jax.vmap(lambda x: sums(mj.attention(x, certain, params, **HEADS)))(pair)

    def expected_log_likelihood(x, params):
        gaussian = mj.objectives.Gaussian(0.5)
        moments = mj.Moments(*mj.dense(x, certain, params))
        given = moments.mean, moments.features
        return mj.objectives.expected_log_likelihood(gaussian, x, *given)

    return {
        "nnx.jit": error(nnx.jit(lambda x: sums(layer(x[None])))(X), expected),
        "jax.export": error(exported.call(X), expected),
        "vmap of attention, values random alone": of_arguments(attention, X, lambda: values),
        "expected_log_likelihood": of_arguments(
            expected_log_likelihood, X, lambda: mj.DenseParams(random)
        ),
    }


GROUPS = {
    "plain": lambda: plain(lambda x: x),
    "materialized": lambda: plain(materialized),
    "ways in": ways_in,
    "hessian": lambda: {s.__name__: second_derivative(s) for s in (mj.Diagonal, mj.Separable)},
}

if __name__ == "__main__":
    print(json.dumps({name: GROUPS[name]() for name in sys.argv[1:] or GROUPS}))
