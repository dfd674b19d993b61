"""Divergence, degenerate curvature and numbers that are not finite: nothing but numbers comes out."""

import functools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.optim import inverses
from tests.optim.networks import compiled, inside

optim = mj.optim
MAKERS = pytest.mark.parametrize("make", [optim.cg_fac, optim.kfac])


def layer(condition=1.0, rank=None):
    """A dense layer, its gradient, and factors of a given condition number or rank in float32."""
    params = {"kernel": jnp.ones((6, 5), jnp.float32)}
    grads = {"kernel": jnp.cos(jnp.arange(30, dtype=jnp.float32)).reshape(6, 5)}

    def factor(seed, n):
        basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0]
        values = np.logspace(0, -np.log10(condition), n)
        if rank is not None:
            values = np.where(np.arange(n) < rank, 1.0, 0.0)
        return jnp.asarray((basis * values) @ basis.T, jnp.float32)[None]

    pair = optim.KroneckerFactor(factor(0, 6), factor(1, 5), jnp.ones((), jnp.float32))
    return params, grads, {"model": pair}


def finite(tree):
    return all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree))


@functools.cache
def fixed(make):
    """A step with fixed damping, given as an argument, and a fixed bound."""

    def update(damping, grads, state, params, factors):
        tx = make(0.1, damping=damping, kl_bound=1e-3)
        return tx.update(grads, state, params, factors=factors)

    return make(0.1, damping=1.0, kl_bound=1e-3), jax.jit(update)


def steps(make, params, grads, factors, damping=None, count=3):
    """Three steps of finite numbers; without `damping`, it and the bound adapt."""
    if damping is None:
        tx, update = compiled(make, 0.1, momentum=0.5)
    else:
        tx, update = fixed(make)[0], partial(fixed(make)[1], damping)
    state = tx.init(params)
    for _ in range(count):
        updates, state = update(grads, state, params, factors=factors)
        assert finite((updates, state))
    return updates, state


@pytest.mark.parametrize("damping", [0.0, 1e-3])
@pytest.mark.parametrize("case", [{"condition": 1e12}, {"rank": 1}, {"rank": 0}], ids=str)
@MAKERS
def test_degenerate_curvature(make, case, damping):
    steps(make, *layer(**case), damping=damping)


@pytest.mark.parametrize("damping", [None, 1e-3])
@MAKERS
def test_zero_gradients_take_no_step(make, damping):
    params, grads, factors = layer()
    updates, _ = steps(make, params, jax.tree.map(jnp.zeros_like, grads), factors, damping)
    assert not np.any(updates["kernel"])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@MAKERS
def test_a_bad_gradient_is_a_step_left_out(make, bad):
    params, grads, factors = layer()
    _, state = steps(make, params, grads, factors)
    update = compiled(make, 0.1, momentum=0.5)[1]
    broken = {"kernel": grads["kernel"].at[0, 0].set(bad)}
    updates, after = update(broken, state, params, factors=factors)
    assert not np.any(updates["kernel"])
    assert finite(after)
    assert int(after.skipped) == 1
    updates, _ = update(grads, after, params, factors=factors)
    assert np.any(updates["kernel"])


@MAKERS
def test_bad_factors_do_not_enter_the_average(make):
    params, grads, factors = layer()
    _, state = steps(make, params, grads, factors)
    broken = {"model": factors["model"]._replace(inputs=factors["model"].inputs.at[0].set(jnp.nan))}
    update = compiled(make, 0.1, momentum=0.5)[1]
    updates, after = update(grads, state, params, factors=broken)
    assert finite((updates, after))
    jax.tree.map(np.testing.assert_array_equal, inside(after).curvature, inside(state).curvature)


def test_no_curvature_yet_is_no_step():
    params, grads, _ = layer()
    tx, update = compiled(optim.kfac, 0.1)
    updates, state = update(grads, tx.init(params), params)
    assert not np.any(updates["kernel"])
    assert int(state.skipped) == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="others call their own library")
def test_calls_of_lapack():
    """None for inverses, for its threads beside those of XLA took up to 400 times as long. None takes a
    batch: batches that run at once have waited for each other for ever on few cores."""
    factor = jnp.ones((16, 5, 5))

    def calls(fn):
        return set(re.findall(r"@lapack_.* : \(tensor<(.*?)x[a-z]", jax.jit(fn).lower().as_text()))

    assert not calls(lambda: inverses.damped_inverses(factor, factor, jnp.ones(())))
    table = {"table": optim.EmbeddingFactor(factor[0], factor, jnp.ones(()))}
    start, true = inverses.no_inverses(table), jnp.ones((), bool)
    assert calls(lambda: inverses.refreshed(table, 1.0, true, true, 10, start)) == {"5x5"}


@pytest.mark.parametrize("size", [1, 40, 41, 129, 700])
def test_inverses_are_numpys(size):
    basis = np.random.default_rng(0).normal(size=(2, size, size)) * np.logspace(0, -2, size)
    matrices = basis @ np.swapaxes(basis, 1, 2) + 1e-3 * np.eye(size)
    truth = np.linalg.inv(matrices)
    found = jax.jit(inverses.inverted)(matrices)
    np.testing.assert_allclose(found, truth, atol=1e-9 * np.abs(truth).max())


def test_a_matrix_without_an_inverse_spoils_no_other():
    eye = jnp.eye(50)
    good, bad = inverses.inverted(jnp.stack([eye, eye.at[45, 45].set(-1.0)]))
    np.testing.assert_allclose(good, eye)
    assert jnp.isnan(bad).any()
