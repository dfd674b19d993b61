"""Moments with matrix products in bfloat16, as by `jax.default_matmul_precision("bfloat16")`.

XLA for CPU ignores that setting. So the operands of all products without an explicit precision are
rounded here, as accelerators round them.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Literal

import moment_jax as mj
from moment_jax.covariance import token_gram
from tests.builders import random_block

FEATURES = 16


def in_bfloat16(function):
    """The function with the operands of its matrix products rounded to bfloat16."""

    def rounded(*args):
        leaves, tree = jax.tree.flatten(args)
        closed, shape = jax.make_jaxpr(
            lambda *flat: function(*jax.tree.unflatten(tree, flat)), return_shape=True
        )(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), _evaluate(closed, leaves))

    return rounded


def _evaluate(closed: ClosedJaxpr, arguments):
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, arguments, strict=True))
    for equation in closed.jaxpr.eqns:
        inputs = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive.name == "scan":  # no products within
            inner = None
        if inner is not None:
            results = _evaluate(inner, inputs)
        else:
            if equation.primitive.name == "dot_general" and equation.params["precision"] is None:
                inputs = [x.astype(jnp.bfloat16).astype(x.dtype) for x in inputs]
            results = equation.primitive.bind(*inputs, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in closed.jaxpr.outvars]


def at_landmarks(variance, count):
    cov = mj.Separable.independent(variance)
    tokens = token_gram.at_landmarks(cov.tokens, count)
    return mj.Separable.unchecked(cov.variances, tokens, cov.features, cov.pool)


# At landmarks of sharp attention much cancels, which products in bfloat16 must not meet.
STARTS = [
    (mj.Diagonal.independent, 16, 1.0),
    pytest.param(mj.Separable.independent, 16, 1.0, marks=pytest.mark.slow),
    pytest.param(partial(at_landmarks, count=12), 48, 4.0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("start", "tokens", "sharpness"), STARTS)
def test_a_block(start, tokens, sharpness):
    with jax.enable_x64(False):
        block = jax.tree.map(
            lambda leaf: leaf.astype(jnp.float32),
            random_block(jax.random.key(1), FEATURES, 4 * FEATURES, 0.1),
        )
        kernel = block.attention.query.kernel
        sharp = dataclasses.replace(kernel, mean=sharpness * kernel.mean)
        query = dataclasses.replace(block.attention.query, kernel=sharp)
        attention = dataclasses.replace(block.attention, query=query)
        block = dataclasses.replace(block, attention=attention)
        x = jax.random.normal(jax.random.key(1), (tokens, FEATURES), jnp.float32)

        def moments(x, block):
            known = start(jnp.full(x.shape, 0.01, x.dtype))
            mean, cov = mj.encoder_block(
                x, known, block, num_heads=2, norm_first=True, activation="gelu"
            )
            return mean, cov.variance()

        mean, variance = jax.jit(moments)(x, block)
        rounded_mean, rounded_variance = jax.jit(in_bfloat16(moments))(x, block)
    assert rounded_mean.dtype == rounded_variance.dtype == jnp.float32
    assert jnp.any(rounded_mean != mean), "nothing was rounded"
    assert jnp.all(rounded_variance >= 0)
    sd = jnp.sqrt(variance)
    ratio = jnp.sqrt(rounded_variance) / sd
    assert jnp.max(jnp.abs(rounded_mean - mean) / sd) < 0.1
    assert jnp.max(jnp.abs(ratio - 1)) < 0.02
