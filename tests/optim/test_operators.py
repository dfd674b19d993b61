"""Operators, inverses and conjugate gradients against dense ones; what compiled programs hold."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim import inverses
from moment_jax.optim.layer_blocks import LayerBlock
from moment_jax.optim.statistics import factors_of
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
    close(optim.apply_curvature(factor, v[None])[0], printed)


def test_rows_of_a_stack_and_their_solution():
    """1/N sum_n J_n <J_n, V>; as many iterations as unknowns give the dense solution."""
    a, g, v = normal(0, 30, 2, 3, 4), normal(1, 30, 2, 3, 3), normal(2, 2, 4, 3)
    block = LayerBlock("layer", ("kernel",), ((2, 4, 3),), 3, (2,))
    statistics = {"layer": optim.RowFactor(a, g, np.full(30, 3.0))}
    factor = factors_of((block,), statistics, 1 / 30)["layer"]
    rows = np.einsum("nlta,nlto->lnao", a, g).reshape(2, 30, 12)
    fisher = np.einsum("lnp,lnq->lpq", rows, rows) / 30

    def apply(v):
        return optim.apply_curvature(factor, v) + v

    def solution():
        return optim.conjugate_gradient(apply, v, max_iterations=12, tolerance=0.0)

    pushed, solved = jax.jit(lambda: (apply(v), solution()))()
    dense = fisher + np.eye(12)
    close(pushed.reshape(2, 12), np.einsum("lpq,lq->lp", dense, v.reshape(2, 12)))
    close(solved.x.reshape(2, 12, 1), np.linalg.solve(dense, v.reshape(2, 12, 1)))
    assert np.all(solved.iterations <= 12)


def test_a_good_preconditioner_needs_one_iteration():
    spectrum, target = np.logspace(0, 6, 10)[None], jnp.asarray(normal(0, 1, 10))
    scaled = {"precondition": lambda r: r / spectrum, "max_iterations": 10, "tolerance": 1e-8}
    solved = optim.conjugate_gradient(lambda x: spectrum * x, target, **scaled)
    assert solved.iterations.tolist() == [1]


@jax.jit
def solve(spectrum, target, start, max_iterations, tolerance):
    """Two systems of eight unknowns, each a product by its spectrum."""
    options = {"max_iterations": max_iterations, "tolerance": tolerance}
    return optim.conjugate_gradient(lambda x: spectrum * x, target, start, **options)


def test_systems_stop_by_themselves():
    """The first has one eigenvalue, so one iteration does; the second has four."""
    spectrum, target = np.array([[2.0] * 8, [1, 2, 3, 4] * 2]), normal(0, 2, 8)
    solved = solve(spectrum, target, np.zeros((2, 8)), 10, 1e-8)
    assert solved.iterations.tolist() == [1, 4]
    close(solved.x, target / spectrum)


def test_a_start_is_never_worse_than_none():
    spectrum, target = np.tile(np.arange(1.0, 9), (2, 1)), normal(0, 2, 8)
    for start in (100 * normal(1, 2, 8), target / spectrum * 7, np.zeros((2, 8))):
        x = solve(spectrum, target, start, 3, 0.0).x
        assert np.all(np.sum(x * (spectrum * x) / 2 - x * target, axis=1) <= 0)
    near = solve(spectrum, target, 7 * target / spectrum, 3, 1e-8)
    assert near.iterations.tolist() == [0, 0]


@pytest.mark.parametrize("spectrum", [0.0, jnp.nan, jnp.inf, -1.0])
def test_an_operator_without_curvature_is_left_alone(spectrum):
    solved = solve(np.full((2, 8), spectrum), np.ones((2, 8)), np.ones((2, 8)), 5, 0.0)
    assert np.all(np.isfinite(solved.x))
    assert np.all(np.isfinite(solved.relative_residual))


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


def largest_array(make, reading, n, tokens, num_inputs, num_features):
    """Entries of the largest array in the compiled update of a dense layer, pooled over tokens."""
    model = nnx.Linear(num_inputs, num_features, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make(0.1, kl_bound=1e-3), wrt=nnx.Param)

    def loss(model, x, labels):
        return classify(lambda x: model(x).mean(axis=1), x, labels)

    compute = optim.value_grad_and_factors(loss, reading=reading)
    graph, start = nnx.split((model, optimizer))

    @jax.jit
    def update(state, x, labels):
        model, optimizer = nnx.merge(graph, state)
        _, grads, factors = compute(model, x, labels)
        optimizer.update(model, grads, factors=factors)
        return nnx.state((model, optimizer))

    x, labels = jnp.ones((n, tokens, num_inputs), jnp.float32), jnp.zeros(n, int)
    found = re.findall(
        r"[a-z]+[0-9]+\[([0-9,]+)\]", update.lower(start, x, labels).compile().as_text()
    )
    return max(math.prod(map(int, shape.split(","))) for shape in found)


@pytest.mark.parametrize("make", [optim.kfac, optim.cg_fac])
def test_kronecker_factors_are_not_multiplied_out(make):
    """Inputs and their ones are seen, 384 * 21; neither F, 210^2, nor the Gram matrix of rows, 384^2."""
    sizes = {"n": 16, "tokens": 24, "num_inputs": 20, "num_features": 10}
    assert 20 * 10 <= largest_array(make, optim.KroneckerExpand(), **sizes) <= 384 * 21


def test_exact_blocks_are_not_formed():
    """The kernel is seen and (41 * 30)^2 is not; the rows are, and their Gram matrix, 384^2, is not."""
    make = partial(optim.cg_fac, decay=None)
    wide = {"n": 2, "tokens": 3, "num_inputs": 40, "num_features": 30}
    assert 40 * 30 <= largest_array(make, optim.PerSample(), **wide) <= 41**2
    many = {"n": 16, "tokens": 24, "num_inputs": 6, "num_features": 4}
    assert largest_array(make, optim.PerSample(), **many) <= 384 * 7 * 4
