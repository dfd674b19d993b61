"""Operators and solutions against dense ones; what compiled programs hold."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim import curvature
from tests.optim.networks import classify, close

optim = mj.optim


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def test_the_row_pair_product_is_the_kronecker_operator():
    """Algorithm 1 as printed, over all pairs of rows, is (a^T a) V (g^T g) / N^2."""
    a, g, v = normal(0, 6, 4), normal(1, 6, 3), normal(2, 4, 3)
    theta = g @ v.T @ a.T  # theta[i, j] = g_i^T V^T a_j
    printed = sum(theta[i, j] * np.outer(a[j], g[i]) for i in range(6) for j in range(6)) / 6**2
    factor = optim.KroneckerFactor((a.T @ a / 6)[None], (g.T @ g / 6)[None], np.ones(()))
    close(curvature.apply_curvature(factor, v[None])[0], printed)


@jax.jit
def solve(spectrum, grad, pair, damping, max_iterations, tolerance):
    """Two layers of four by two parameters, whose F is diagonal."""
    inputs, outputs = jax.vmap(jnp.diag)(spectrum), jnp.tile(jnp.eye(2), (2, 1, 1))
    factor = optim.KroneckerFactor(inputs, outputs, 1.0)
    options = {"max_iterations": max_iterations, "tolerance": tolerance}
    return curvature.iterated(pair, factor, grad, damping, **options)


def test_as_many_iterations_as_eigenvalues_solve_each_layer():
    """The first has one, the second four; a good preconditioner makes one of them."""
    spectrum, grad = np.array([[2.0] * 4, [1, 2, 3, 4]]), normal(0, 2, 4, 2)
    damped = spectrum[:, :, None] + 0.5
    one, four = (solve(spectrum, grad, None, 0.5, most, 0.0) for most in (1, 4))
    close(one[0], grad[0] / 2.5)
    assert np.abs(one[1] - grad[1] / damped[1]).max() > 1e-3
    close(four, grad / damped)
    inverse = jax.vmap(jnp.diag)(1 / damped[:, :, 0])
    pair = curvature.InversePair(inverse, jnp.tile(jnp.eye(2), (2, 1, 1)))
    close(solve(spectrum, grad, pair, 0.5, 1, 0.0), grad / damped)
    assert not np.any(solve(spectrum, grad, None, 0.5, 4, 1.0))  # the tolerance


@pytest.mark.parametrize("bad", [0.0, jnp.nan, jnp.inf, -1.0])
def test_an_operator_without_curvature_is_left_alone(bad):
    """And spoils no other."""
    spectrum, grad = np.array([[bad] * 4, [2.0] * 4]), np.ones((2, 4, 2))
    np.testing.assert_allclose(solve(spectrum, grad, None, 0.0, 5, 0.0), grad * [[[0]], [[0.5]]])


def test_an_inversion_that_fails_leaves_the_old_inverse():
    """Of its layer alone."""
    factor = optim.KroneckerFactor(
        jnp.tile(jnp.eye(5), (2, 1, 1)), jnp.ones((2, 1, 1)), jnp.ones(())
    )
    bad = factor._replace(inputs=factor.inputs.at[1, 3, 3].set(-1.0))
    new = curvature.inverted(bad, jnp.float32(0.01), curvature.no_inverses({"": bad})[""])
    np.testing.assert_allclose(new.inputs[0], np.eye(5) / 1.1, rtol=1e-6)
    assert not np.any(new.inputs[1])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="others call their own library")
def test_calls_of_lapack():
    """None, for its threads beside those of XLA took up to 400 times as long."""
    factor = jnp.ones((16, 5, 5))

    for inputs in (factor, factor[:, 0]):
        inverses = jax.jit(curvature.damped_inverses).lower(inputs, factor, jnp.float32(1))
        assert "lapack" not in inverses.as_text()


@pytest.mark.parametrize("make", [optim.kfac, optim.cg_fac])
def test_kronecker_factors_are_not_multiplied_out(make):
    """Inputs and their ones are seen, 384 * 21; neither F, 210^2, nor the Gram matrix of rows, 384^2."""
    model = nnx.Linear(20, 10, rngs=nnx.Rngs(0))

    def loss(model, x, labels):
        return classify(lambda x: model(x).mean(axis=1), x, labels)

    @jax.jit
    def update(params, state, x, labels):
        grads, factors = optim.value_grad_and_factors(loss)(nnx.merge(graph, params), x, labels)[1:]
        return tx.update(grads, state, params, factors=factors)

    graph, params = nnx.split(model)
    x, labels = jnp.ones((16, 24, 20), jnp.float32), jnp.zeros(16, int)
    blocks = optim.find_blocks(loss, model, x, labels)
    tx = make(0.1, damping=0.1, kl_bound=1e-3, blocks=blocks)
    program = update.lower(params, tx.init(params), x, labels).compile().as_text()
    shapes = re.findall(r"[a-z]+[0-9]+\[([0-9,]+)\]", program)
    sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
    assert 20 * 10 <= max(sizes) <= 384 * 21
