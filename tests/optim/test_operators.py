"""The operators against dense Fisher matrices, and conjugate gradients against a dense solution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.optim.layer_blocks import LayerBlock
from moment_jax.optim.statistics import factors_of
from tests.optim.networks import close

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
    kronecker = np.kron(factor.inputs[0], factor.outputs[0])
    close(optim.apply_curvature(factor, v[None]).ravel(), kronecker @ v.ravel())


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
