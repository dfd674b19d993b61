"""Divergence, degenerate curvature and numbers that are not finite: nothing but numbers comes out."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim.inverses import inverted
from tests.optim.networks import Perceptron, classify, dense_batch, inside

optim = mj.optim
METHODS = [
    partial(optim.cg_fac, max_iterations=4),
    optim.kfac,
    partial(optim.kfac, inversion=optim.Eigh()),
    partial(optim.kfac, inversion=optim.NewtonSchulz()),
]
IDS = ["cg_fac", "kfac", "kfac eigh", "kfac newton"]


def layer(condition=1.0, rank=None):
    """A dense layer, its gradient, and factors of a given condition number or rank in float32."""
    params = {"kernel": jnp.ones((6, 5), jnp.float32)}
    grads = {"kernel": jnp.cos(jnp.arange(30, dtype=jnp.float32)).reshape(6, 5)}

    def factor(seed, n):
        basis = jnp.linalg.qr(jax.random.normal(jax.random.key(seed), (n, n), jnp.float64))[0]
        values = jnp.logspace(0, -np.log10(condition), n)
        if rank is not None:
            values = jnp.where(jnp.arange(n) < rank, 1.0, 0.0)
        return ((basis * values[None, :]) @ basis.T)[None].astype(jnp.float32)

    pair = optim.KroneckerFactor(factor(0, 6), factor(1, 5), jnp.ones((), jnp.float32))
    return params, grads, {"model": pair}


def finite(tree):
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(tree))


def steps(tx, params, grads, factors, count=3):
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(count):
        updates, state = update(grads, state, params, factors=factors)
        assert finite(updates)
        assert finite(state)
    return updates, state


@pytest.mark.parametrize("damping", [0.0, 1e-3])
@pytest.mark.parametrize("case", [{"condition": 1e12}, {"rank": 1}, {"rank": 0}], ids=str)
@pytest.mark.parametrize("make", METHODS, ids=IDS)
def test_degenerate_curvature(make, case, damping):
    steps(make(0.1, damping=damping, kl_bound=1e-3), *layer(**case))


@pytest.mark.parametrize("make", METHODS, ids=IDS)
def test_zero_gradients_take_no_step(make):
    params, grads, factors = layer()
    updates, _ = steps(
        make(0.1, kl_bound=1e-3), params, jax.tree.map(jnp.zeros_like, grads), factors
    )
    assert not np.any(updates["kernel"])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("make", METHODS, ids=IDS)
def test_a_bad_gradient_is_a_step_left_out(make, bad):
    params, grads, factors = layer()
    tx = make(0.1, momentum=0.5)
    _, state = steps(tx, params, grads, factors)
    broken = {"kernel": grads["kernel"].at[0, 0].set(bad)}
    updates, after = tx.update(broken, state, params, factors=factors)
    assert not np.any(updates["kernel"])
    assert finite(after)
    assert int(after.skipped) == 1
    updates, _ = tx.update(grads, after, params, factors=factors)
    assert np.any(updates["kernel"])


@pytest.mark.parametrize("make", METHODS, ids=IDS)
def test_bad_factors_do_not_enter_the_average(make):
    params, grads, factors = layer()
    tx = make(0.1)
    _, state = steps(tx, params, grads, factors)
    broken = {"model": factors["model"]._replace(inputs=factors["model"].inputs.at[0].set(jnp.nan))}
    updates, after = tx.update(grads, state, params, factors=broken)
    assert finite((updates, after))
    jax.tree.map(np.testing.assert_array_equal, inside(after).curvature, inside(state).curvature)


def test_no_curvature_yet_is_no_step():
    params, grads, _ = layer()
    tx = optim.kfac(0.1)
    updates, state = tx.update(grads, tx.init(params), params)
    assert not np.any(updates["kernel"])
    assert int(state.skipped) == 1


@pytest.mark.parametrize("make", METHODS[:2], ids=IDS[:2])
def test_a_learning_rate_ten_times_too_high(make):
    model, (x, labels) = Perceptron(), dense_batch()
    x = x.astype(jnp.float32)
    compute = optim.value_grad_and_factors(classify)
    optimizer = nnx.Optimizer(model, make(10.0, damping=1e-4, kl_bound=1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, grads, factors = compute(model, x, labels)
        optimizer.update(model, grads, factors=factors)
        return value

    values = [float(step(model, optimizer)) for _ in range(40)]
    assert np.all(np.isfinite(values))
    assert values[-1] < values[0]  # the bound, not the rate, sets the step


def test_a_batch_of_one():
    model, (x, labels) = Perceptron(), dense_batch(n=1)
    compute = optim.value_grad_and_factors(classify, reading=optim.PerSample())
    tx = optim.cg_fac(0.1, damping=1e-6, decay=None, kl_bound=1e-3)
    _, grads, factors = nnx.jit(compute)(model, x.astype(jnp.float32), labels)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.jit(lambda o, m, g, f: o.update(m, g, factors=f))(optimizer, model, grads, factors)
    assert finite(nnx.state(model))


def inverses(inversion, sizes):
    """Of 16 matrices of each size, with nothing that makes one size wait for another."""
    for n in sizes:
        factor = jnp.tile(2 * jnp.eye(n)[None], (16, 1, 1))
        yield inversion.refreshed(factor, factor, jnp.ones(()))


def lapack_calls(inversion):
    """The shapes of what LAPACK is called with."""
    text = jax.jit(lambda: list(inverses(inversion, [5]))).lower().as_text()
    return set(re.findall(r"@lapack_.* : \(tensor<(.*?)x[a-z]", text))


def test_no_call_of_lapack_takes_a_batch():
    """Batches of LAPACK calls that run at once have waited for each other for ever on few cores."""
    assert lapack_calls(optim.Eigh()) == {"5x5"}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="others call their own library")
def test_inverses_need_no_lapack():
    """Its threads beside those of XLA took up to 400 times as long."""
    assert not lapack_calls(optim.Cholesky())


@pytest.mark.parametrize("size", [1, 40, 41, 129, 700])
def test_inverses_are_numpys(size):
    basis = np.random.default_rng(0).normal(size=(2, size, size)) * np.logspace(0, -2, size)
    matrices = basis @ np.swapaxes(basis, 1, 2) + 1e-3 * np.eye(size)
    truth = np.linalg.inv(matrices)
    found = jax.jit(inverted)(matrices)
    np.testing.assert_allclose(found, truth, atol=1e-9 * np.abs(truth).max())


def test_a_matrix_without_an_inverse_spoils_no_other():
    eye = jnp.eye(50)
    good, bad = inverted(jnp.stack([eye, eye.at[45, 45].set(-1.0)]))
    np.testing.assert_allclose(good, eye)
    assert jnp.isnan(bad).any()


MANY_INVERSES = """
import jax
import moment_jax as mj
from tests.optim.test_robustness import inverses
sizes = (65, 64, 48, 32, 129, 100, 70, 80)
jax.block_until_ready(jax.jit(lambda: list(inverses(mj.optim.Cholesky(), sizes)))())
"""


def test_inverses_of_many_groups_of_layers_end():
    """As batches the first run of these never ended."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", MANY_INVERSES], cwd=root, check=True, timeout=200)
