"""`Separable`'s attention as a Pallas kernel, interpreted, agrees with the program without it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from moment_jax.layers.attention.head_kernel import HeadKernel
from moment_jax.xla import kernels
from tests.builders import assert_close, random_block, random_cov

HEADS, WIDTH = 2, 8


class Case(NamedTuple):
    structure: type[mj.Covariance]
    queries: int
    keys: int
    mask: str | None
    order: int = 2
    batch: bool = False


CASES = [
    Case(mj.Separable, 7, 7, "causal", batch=True),
    Case(mj.Separable, 9, 9, "by head"),
    Case(mj.Separable, 5, 9, "padding", batch=True),
    Case(mj.BatchSeparable, 9, 9, "padding", order=1),
]


def mask_of(case: Case) -> jax.Array | None:
    """By head, one query sees no key."""
    shape = case.queries, case.keys
    if case.mask == "causal":
        return jnp.tril(jnp.ones(shape, bool))
    if case.mask == "padding":
        return (jnp.arange(case.keys) < case.keys - 2)[None, :]
    if case.mask == "by head":
        seen = jax.random.bernoulli(jax.random.key(5), 0.7, (HEADS, *shape))
        return seen.at[:, 1].set(False)
    return None


def with_gradient(case: Case):
    """Moments, and the gradient by parameters, inputs and memory; and whether a kernel ran."""
    params = random_block(jax.random.key(0), WIDTH, 16, 0.3).attention
    (x, cov), (memory, memory_cov) = (
        (
            jax.random.normal(jax.random.key(tokens), (tokens, WIDTH)),
            random_cov(jax.random.key(tokens + 1), case.structure, (tokens, WIDTH), 0.3),
        )
        for tokens in (case.queries, case.keys)
    )
    settings = {"num_heads": HEADS, "mask": mask_of(case), "order": case.order}

    def attend(x, params, cov, memory, memory_cov):
        if case.queries == case.keys:
            mean, cov = mj.attention(x, cov, params, **settings)
        else:
            mean, cov = mj.cross_attention(x, cov, memory, memory_cov, params, **settings)
        return mean, cov.variance(), cov.token_correlation, cov.feature_correlation

    def total(x, *others):
        attend_all = attend
        if case.batch:  # parameters are shared, so their derivatives are sums over the batch
            x, attend_all = jnp.stack([x, -0.5 * x]), jax.vmap(attend, (0, *[None] * 4))
        found = attend_all(x, *others)
        return sum(jnp.sum(jnp.sin(3 * part)) for part in found), found

    arguments = x, params, cov, memory, memory_cov
    traced = jax.jit(
        lambda *args: jax.value_and_grad(total, argnums=range(5), has_aux=True)(*args)
    ).trace(*arguments)
    return "pallas_call" in str(traced.jaxpr), traced.lower().compile()(*arguments)


@pytest.mark.parametrize("case", CASES)
def test_moments_and_gradients(case: Case):
    plain, expected = with_gradient(case)
    with kernels("interpret"):
        by_kernel, found = with_gradient(case)
    assert by_kernel
    assert not plain
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert jnp.all(jnp.isfinite(one))
        assert_close(one, other, 1e-9)


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
