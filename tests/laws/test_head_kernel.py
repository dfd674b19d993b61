"""A function of one head as a Pallas kernel, interpreted, agrees with the program without it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from moment_jax.layers.attention.head_kernel import HeadKernel, OfHeads
from moment_jax.xla import kernels
from tests.builders import assert_close, random_block, random_cov

HEADS, WIDTH = 2, 8


def assert_same(found, expected):
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert jnp.all(jnp.isfinite(one))
        assert_close(one, other, 1e-9)


def total(found):
    return sum(jnp.sum(jnp.sin(3 * part)) for part in jax.tree.leaves(found)), found


def mean_of_values(one: OfHeads) -> OfHeads:
    """Attention to values that heads share, and what heads add to a sum; a query may see no key."""
    (query, key, bias, mask), (value, again) = one
    scores = query @ key.T + bias[None, :]
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    weights = jax.nn.softmax(scores)
    return OfHeads((weights @ value, jnp.sum(weights, axis=1)), jnp.sin(weights) @ again)


@pytest.mark.parametrize("mask_shape", [None, (HEADS, 1, 9), (HEADS, 5, 9)])
def test_any_function_of_a_head(mask_shape):
    """In a batch with shared arguments, whose derivatives are sums over the batch."""
    shapes = (2, HEADS, 5, WIDTH), (2, HEADS, 9, WIDTH), (HEADS, 9), (9, WIDTH)
    arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    mask = None
    if mask_shape is not None:
        mask = jax.random.bernoulli(jax.random.key(5), 0.7, mask_shape)

    def plain(heads: OfHeads) -> OfHeads:
        each, common = jax.vmap(lambda each: mean_of_values(heads._replace(each=each)))(heads.each)
        return OfHeads(each, jnp.sum(common, axis=0))

    def slopes(run):
        def batch(query, key, bias, value):
            def one(query, key):
                return run(OfHeads((query, key, bias, mask), (value, value)))

            return total(jax.vmap(one)(query, key))

        return jax.jit(jax.grad(batch, range(4), has_aux=True))(*arrays)

    with kernels("interpret"):
        kernel = HeadKernel.of(mean_of_values, (HEADS, 5, 9), jnp.float64, 0)
    assert_same(slopes(kernel), slopes(plain))


class Case(NamedTuple):
    structure: type[mj.Covariance]
    queries: int
    keys: int
    mask: str
    order: int = 2
    slopes: bool = False


CASES = [
    Case(mj.Separable, 7, 7, "causal"),
    Case(mj.Separable, 9, 9, "by head", slopes=True),
    Case(mj.Separable, 5, 9, "padding"),
    Case(mj.BatchSeparable, 9, 9, "padding", order=1),
]


def mask_of(case: Case) -> jax.Array:
    """By head, one query sees no key."""
    shape = case.queries, case.keys
    if case.mask == "causal":
        return jnp.tril(jnp.ones(shape, bool))
    if case.mask == "padding":
        return (jnp.arange(case.keys) < case.keys - 2)[None, :]
    seen = jax.random.bernoulli(jax.random.key(5), 0.7, (HEADS, *shape))
    return seen.at[:, 1].set(False)


def moments_of_attention(case: Case):
    """Moments, with the gradient by inputs and parameters if asked for; and whether a kernel ran."""
    params = random_block(jax.random.key(0), WIDTH, 16, 0.3).attention
    x, memory = (
        (
            jax.random.normal(jax.random.key(tokens), (tokens, WIDTH)),
            random_cov(jax.random.key(tokens + 1), case.structure, (tokens, WIDTH), 0.3),
        )
        for tokens in (case.queries, case.keys)
    )
    settings = {"num_heads": HEADS, "mask": mask_of(case), "order": case.order}

    def attend(x, memory, params):
        if case.queries == case.keys:
            mean, cov = mj.attention(*x, params, **settings)
        else:
            mean, cov = mj.cross_attention(*x, *memory, params, **settings)
        return mean, cov.variance(), cov.token_correlation, cov.feature_correlation

    def batch(x, *others):
        means = jnp.stack([x[0], -0.5 * x[0]])
        return jax.vmap(lambda mean: attend((mean, x[1]), *others))(means)

    run = batch if case.structure is mj.Separable else attend
    if case.slopes:
        run = jax.grad(lambda *given: total(batch(*given)), range(3), has_aux=True)
    traced = jax.jit(lambda *given: run(*given)).trace(x, memory, params)
    return "pallas_call" in str(traced.jaxpr), traced.lower().compile()(x, memory, params)


@pytest.mark.parametrize("case", CASES)
def test_attention(case: Case):
    plain, expected = moments_of_attention(case)
    with kernels("interpret"):
        by_kernel, found = moments_of_attention(case)
    assert by_kernel
    assert not plain
    assert_same(found, expected)


def test_which_arguments_get_no_kernel():
    def found(shape, dtype=jnp.float32):
        return HeadKernel.of(lambda one: one, shape, dtype, 0) is not None

    assert not found((2, 196, 196))
    with kernels("tpu"):
        assert found((2, 196, 196))
        assert not found((2, 196, 196), jnp.float64)
        assert not found((2, 512, 512))
    with kernels("interpret"):
        assert found((2, 7, 7), jnp.float64)
