"""The exact Fisher block of a batch in the cheapest of three forms.

F V = 1/N sum_n J_n <J_n, V> + damping V, J_n = sum_t a_nt g_nt^T. All forms take the same iterations of
conjugate gradients:

- rows: a and g as they are, 4 N T (rows) (columns) operations per product;
- gradients: J formed once, 4 N (rows) (columns) per product;
- row space: every iterate is a combination of b and the J_n, so the iteration runs on N + 1
  coefficients, with inner products by the Gram matrix of those vectors: 2 N^2 per product. With one
  token per sample that matrix is (a a^T) * (g g^T). No array has (N T)^2 entries.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from moment_jax.optim.conjugate_gradient import Solution, conjugate_gradient
from moment_jax.optim.factors import RowFactor, apply_curvature

Solver = Callable[..., Solution]


def cheapest_form(factor: RowFactor, max_iterations: int) -> Solver:
    """The form with the fewest operations for this many iterations; depends on static shapes only."""
    _, n, t, rows = factor.inputs.shape
    columns = factor.outputs.shape[-1]
    size = rows * columns
    forming = 2 * n * t * size
    gram = 2 * n * n * (rows + columns) if t == 1 else forming + 2 * n * n * size
    costs: dict[Solver, int] = {
        solve_by_rows: 4 * n * t * size * (max_iterations + 1),
        solve_by_gradients: forming + 4 * n * size * (max_iterations + 1),
        solve_in_row_space: gram + 6 * n * t * size + 2 * (n + 2) ** 2 * (max_iterations + 1),
    }
    return min(costs, key=lambda solver: costs[solver])


def solve_by_rows(factor: RowFactor, target: Array, damping: Array, **options: Any) -> Solution:
    """Solve (F + damping I) x = target, (L, rows, columns), with a and g as they are."""
    return conjugate_gradient(
        lambda v: apply_curvature(factor, v) + damping * v, target, None, **options
    )


def solve_by_gradients(
    factor: RowFactor,
    target: Array,
    damping: Array,
    solve: Solver = solve_by_rows,
    **options: Any,
) -> Solution:
    """The same with every example's gradient formed: as rows of one token, and of one column."""
    gradients = jnp.einsum("lnta,lnto->lnao", factor.inputs, factor.outputs)
    gradients = gradients.reshape(*gradients.shape[:2], 1, -1)
    formed = RowFactor(gradients, jnp.ones_like(gradients[..., :1]), factor.weight)
    solved = solve(formed, target.reshape(len(target), -1, 1), damping, **options)
    return solved._replace(
        x=solved.x.reshape(target.shape), residual=solved.residual.reshape(target.shape)
    )


def solve_in_row_space(
    factor: RowFactor, target: Array, damping: Array, **options: Any
) -> Solution:
    """The same in the coefficients of the target and the examples' gradients."""
    n, tokens = factor.inputs.shape[1:3]
    if tokens > 1:
        return solve_by_gradients(factor, target, damping, solve=solve_in_row_space, **options)
    a, g = factor.inputs[:, :, 0], factor.outputs[:, :, 0]
    across = jnp.einsum("lna,lao,lno->ln", a, target, g)[:, None]
    among = jnp.einsum("lao,lao->l", target, target)[:, None, None]
    rows = jnp.einsum("lna,lma->lnm", a, a) * jnp.einsum("lno,lmo->lnm", g, g)
    gram = jnp.block([[among, across], [jnp.swapaxes(across, 1, 2), rows]])

    def apply(coefficients: Array) -> Array:
        inner = jnp.einsum("lij,lj->li", gram[:, 1:], coefficients) / n
        return damping * coefficients + jnp.pad(inner, ((0, 0), (1, 0)))

    def inner(left: Array, right: Array) -> Array:
        return jnp.einsum("li,lij,lj->l", left, gram, right)

    first = jnp.zeros(gram.shape[:2], gram.dtype).at[:, 0].set(1)
    solved = conjugate_gradient(apply, first, None, inner=inner, **options)

    def spread(coefficients: Array) -> Array:
        of_rows = jnp.einsum("lna,lno->lao", a * coefficients[:, 1:, None], g)
        return coefficients[:, 0, None, None] * target + of_rows

    return solved._replace(x=spread(solved.x), residual=spread(solved.residual))
