"""The linearised network: exact where the function is linear in its weights, whatever their family."""

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from tests.builders import KERNEL_FAMILIES, random_kernel

FAMILIES = [random_kernel(jax.random.key(0), family, (3, 2)) for family in KERNEL_FAMILIES]
MEAN = FAMILIES[0].mean


def test_of_a_dense_layer_it_is_the_dense_layer():
    x = jax.random.normal(jax.random.key(4), (4, 3))

    def moments(kernel):
        expected = mj.dense(x, mj.Full.zeros(x.shape), mj.DenseParams(kernel))
        found = mj.linearised(lambda w: x @ w)(kernel)
        return expected, found, mj.propagate(lambda w: x @ w, structure=mj.Full)(kernel)

    every = jax.jit(lambda kernels: [moments(kernel) for kernel in kernels])(FAMILIES)
    for kernel, found in zip(FAMILIES, every, strict=True):
        expected, *others = found
        for mean, cov in others:
            assert jnp.allclose(mean, expected[0], atol=1e-5), type(kernel)
            assert jnp.allclose(cov.cov, expected[1].cov, atol=1e-4), type(kernel)


def test_of_a_network_it_is_the_limit_of_small_noise():
    w = {"a": MEAN, "b": MEAN.T}
    small = jax.tree.map(lambda a: mj.posterior.Factorized(a, jnp.full(a.shape, 1e-8)), w)

    def fn(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    x = jnp.ones((2, 3))
    fns = (
        mj.linearised(fn), mj.propagate(fn, structure=mj.Full), mj.linearised(fn, structure=mj.Diagonal)
    )  # fmt: skip
    (mean, cov), (other, other_cov), (_, alone) = jax.jit(lambda p: [f(p, x) for f in fns])(small)
    assert jnp.allclose(alone.variance(), cov.variance(), rtol=1e-5, atol=0)
    assert jnp.allclose(mean, other, atol=1e-5)
    assert jnp.allclose(cov.cov, other_cov.cov, rtol=1e-3, atol=1e-11)


def test_a_covariance_that_no_memory_holds_is_refused():
    kernel = mj.posterior.Factorized(jnp.ones((3, 1000)), jnp.ones((3, 1000)))
    with pytest.raises(ValueError, match=r"64000 outputs .64, 1000.*structure=mj.Diagonal"):
        mj.linearised(lambda w: jnp.ones((64, 3)) @ w)(kernel)


def with_rule(fn, factor):
    """The function, its derivative multiplied by a factor."""
    custom = jax.custom_vjp(fn)
    custom.defvjp(lambda x: (fn(x), x), lambda x, g: (factor * jax.vjp(fn, x)[1](g)[0],))
    return custom


def straight_through(x):
    return x + jax.lax.stop_gradient(jnp.round(x) - x)


def softmax(x):
    e = jnp.exp(x - jax.lax.stop_gradient(x.max()))
    return e / e.sum()


def looped(fn):
    return lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, length=2)[0]


WRONG = [
    straight_through, looped(jax.lax.stop_gradient), jax.checkpoint(with_rule(jnp.sin, 2.0)),
    jax.jit(lambda x: softmax(x) + jax.lax.stop_gradient(x)),
]  # fmt: skip
RIGHT = {
    softmax: jax.nn.softmax,
    with_rule(jnp.sin, 1.0): jnp.sin,
    looped(softmax): looped(jax.nn.softmax),
}


@pytest.mark.parametrize("fn", WRONG)
def test_derivatives_that_are_not_those_of_the_values_are_refused(fn):
    with pytest.raises(ValueError, match=r"what the network computes. Got (stop|custom).*test_lin"):
        mj.linearised(lambda w, x: fn(x @ w))(FAMILIES[1], jnp.ones(3))


@pytest.mark.parametrize("fn", RIGHT)
def test_derivatives_of_the_values_are_taken_however_they_are_written(fn):
    # The bias changes nothing but for rounding.
    bias = mj.posterior.Factorized(jnp.full(1, 0.3), jnp.ones(1))
    params = {"w": FAMILIES[1], "bias": bias}
    found, known = (
        mj.linearised(lambda p, x, f=f: f(x @ p["w"] + p["bias"]))(params, jnp.ones(3))[1]
        for f in (fn, RIGHT[fn])
    )
    assert jnp.allclose(found.variance(), known.variance(), rtol=1e-5)
