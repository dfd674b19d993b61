"""The operators against dense Fisher matrices, and conjugate gradients against a dense solution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim.row_systems import (
    cheapest_form,
    solve_by_gradients,
    solve_by_rows,
    solve_in_row_space,
)
from tests.optim.networks import Everything, N, classify, everything_batch

optim = mj.optim


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


def row_factor(n=5, t=1, rows=4, columns=3, layers=2):
    return optim.RowFactor(
        normal(0, layers, n, t, rows), normal(1, layers, n, t, columns), jnp.ones(())
    )


def dense_fisher(factor):
    """1/N sum_n vec(J_n) vec(J_n)^T, formed."""
    jacobian = jnp.einsum("lnta,lnto->lnao", factor.inputs, factor.outputs)
    flat = jacobian.reshape(*jacobian.shape[:2], -1)
    return jnp.einsum("lnp,lnq->lpq", flat, flat) / flat.shape[1]


def close(left, right, tolerance=1e-10):
    scale = np.max(np.abs(right))
    np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance * scale)


def test_the_exact_block_is_the_dense_empirical_fisher():
    """From the gradients of single examples, by jax.grad, of a network with every kind of layer."""
    model, (symbols, labels) = Everything(), everything_batch()
    compute = optim.value_grad_and_factors(
        classify, reading=optim.PerSample(), fisher=optim.EmpiricalFisher(), dtype=jnp.float64
    )
    factors = nnx.jit(compute)(model, symbols, labels)[2]

    @nnx.jit
    def gradient(model, one, label):
        return nnx.grad(lambda model: classify(model, one[None], label[None])[0])(model)

    each = [gradient(model, s, y) for s, y in zip(symbols, labels, strict=True)]
    for name in ("conv", "attention/key", "attention/out", "general", "out"):
        jacobian = []
        for grads in each:
            node = grads
            for part in name.split("/"):
                node = node[part]
            kernel = node["kernel"][...].ravel()
            has_bias = "bias" in node
            jacobian.append(
                jnp.concatenate([kernel, node["bias"][...].ravel()]) if has_bias else kernel
            )
        jacobian = jnp.stack(jacobian)
        fisher = jacobian.T @ jacobian / N
        factor = factors[name]
        shape = (1, factor.inputs.shape[-1], factor.outputs.shape[-1])
        v = normal(2, *shape)
        close(optim.apply_curvature(factor, v).ravel(), fisher @ v.ravel())


def test_the_row_pair_product_is_the_kronecker_operator():
    """Algorithm 1 as printed, over all pairs of rows, is (a^T a) V (g^T g) / N^2."""
    a, g, v = normal(0, 6, 4), normal(1, 6, 3), normal(2, 4, 3)
    theta = g @ v.T @ a.T  # theta[i, j] = g_i^T V^T a_j
    printed = sum(theta[i, j] * jnp.outer(a[j], g[i]) for i in range(6) for j in range(6)) / 6**2
    factor = optim.KroneckerFactor((a.T @ a / 6)[None], (g.T @ g / 6)[None], jnp.ones(()))
    close(optim.apply_curvature(factor, v[None])[0], printed)
    kronecker = jnp.kron(factor.inputs[0], factor.outputs[0])
    close(optim.apply_curvature(factor, v[None]).ravel(), kronecker @ v.ravel())


@pytest.mark.parametrize("t", [1, 3])
def test_every_form_of_the_exact_block_takes_the_same_iterations(t):
    factor, target, start = row_factor(t=t), normal(3, 2, 4, 3), normal(4, 2, 4, 3)
    for iterations in (1, 3, 8):
        solved = [
            jax.jit(form)(factor, target, start, 0.1, max_iterations=iterations, tolerance=1e-12)
            for form in (solve_by_rows, solve_by_gradients, solve_in_row_space)
        ]
        for other in solved[1:]:
            close(other.x, solved[0].x, 1e-9)


def test_the_form_is_chosen_by_its_cost():
    wide = [row_factor(n=8, t=1, rows=64, columns=64, layers=1), 10]
    assert cheapest_form(*wide) is solve_in_row_space
    many = [row_factor(n=512, t=1, rows=4, columns=4, layers=1), 5]
    assert cheapest_form(*many) is solve_by_rows
    long = [row_factor(n=64, t=16, rows=16, columns=16, layers=1), 5]
    assert cheapest_form(*long) is solve_by_gradients


def test_as_many_iterations_as_unknowns_give_the_dense_solution():
    factor, target = row_factor(n=60), normal(3, 2, 4, 3)
    matrix = dense_fisher(factor) + 1.0 * jnp.eye(12)[None]
    exact = jnp.linalg.solve(matrix, target.reshape(2, 12, 1)).reshape(2, 4, 3)
    solved = solve_by_rows(
        factor, target, jnp.zeros_like(target), 1.0, max_iterations=12, tolerance=0.0
    )
    close(solved.x, exact)
    assert np.all(solved.iterations <= 12)


def test_systems_stop_by_themselves():
    """The first has one eigenvalue, so one iteration does; the second has four."""
    spectrum = jnp.array([[2.0, 2, 2, 2], [1, 2, 3, 4]])
    target = normal(0, 2, 4)
    solved = optim.conjugate_gradient(
        lambda x: spectrum * x, target, jnp.zeros((2, 4)), max_iterations=10, tolerance=1e-8
    )
    assert solved.iterations.tolist() == [1, 4]
    close(solved.x, target / spectrum)


def test_a_start_is_never_worse_than_none():
    spectrum, target = jnp.arange(1.0, 9)[None], normal(0, 1, 8)
    for start in (100 * normal(1, 1, 8), target / spectrum * 7, jnp.zeros((1, 8))):
        solved = optim.conjugate_gradient(
            lambda x: spectrum * x, target, start, max_iterations=3, tolerance=0.0
        )
        energy = jnp.sum(solved.x * (spectrum * solved.x) / 2 - solved.x * target)
        assert energy <= 0
    near = optim.conjugate_gradient(
        lambda x: spectrum * x, target, 7 * target / spectrum, max_iterations=3, tolerance=1e-8
    )
    assert near.iterations.tolist() == [0]


def test_a_good_preconditioner_needs_one_iteration():
    spectrum, target = jnp.logspace(0, 6, 10)[None], normal(0, 1, 10)
    solved = optim.conjugate_gradient(
        lambda x: spectrum * x,
        target,
        jnp.zeros((1, 10)),
        max_iterations=10,
        tolerance=1e-8,
        precondition=lambda r: r / spectrum,
    )
    assert solved.iterations.tolist() == [1]


@pytest.mark.parametrize("spectrum", [0.0, jnp.nan, jnp.inf, -1.0])
def test_an_operator_without_curvature_is_left_alone(spectrum):
    solved = optim.conjugate_gradient(
        lambda x: spectrum * x, jnp.ones((1, 3)), jnp.ones((1, 3)), max_iterations=5, tolerance=0.0
    )
    assert np.all(np.isfinite(solved.x))
    assert np.all(np.isfinite(solved.relative_residual))
