"""The exact Fisher block of a batch: F V = 1/N sum_n J_n <J_n, V>, J_n = sum_t a_nt g_nt^T.

With several tokens per example every J_n is formed once, as a row of one token. Conjugate gradients then
take the same iterations in the cheaper of two forms:

- rows: a and g as they are, 4 N (rows) (columns) operations per product;
- row space: every iterate is a combination of b and the J_n, so the iteration runs on N + 1
  coefficients, with inner products by the Gram matrix of those vectors: 2 N^2 per product.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from moment_jax.optim.conjugate_gradient import Solution, conjugate_gradient
from moment_jax.optim.factors import RowFactor, apply_curvature


def solve_rows(
    factor: RowFactor, target: Array, damping: Array, *, max_iterations: int | Array, **options: Any
) -> Solution:
    """Solve (F + damping I) x = target, (L, rows, columns)."""
    _, n, tokens, rows = factor.inputs.shape
    options["max_iterations"] = max_iterations
    if tokens > 1:
        gradients = jnp.einsum("lnta,lnto->lnao", factor.inputs, factor.outputs)
        gradients = gradients.reshape(*gradients.shape[:2], 1, -1)
        formed = RowFactor(gradients, jnp.ones_like(gradients[..., :1]), factor.weight)
        solved = solve_rows(formed, target.reshape(len(target), -1, 1), damping, **options)
        x, residual = (array.reshape(target.shape) for array in solved[:2])
        return solved._replace(x=x, residual=residual)
    columns = factor.outputs.shape[-1]
    size, products = rows * columns, (max_iterations if isinstance(max_iterations, int) else 10) + 1
    in_space = 2 * n * n * (rows + columns) + 6 * n * size + 2 * (n + 1) ** 2 * products
    if in_space < 4 * n * size * products:
        return solve_in_row_space(factor, target, damping, **options)
    return conjugate_gradient(
        lambda v: apply_curvature(factor, v) + damping * v, target, None, **options
    )


def solve_in_row_space(
    factor: RowFactor, target: Array, damping: Array, **options: Any
) -> Solution:
    """The same with one token per example, in the coefficients of the target and of the J_n."""
    a, g = factor.inputs[:, :, 0], factor.outputs[:, :, 0]
    across = jnp.einsum("lna,lao,lno->ln", a, target, g)[:, None]
    among = jnp.einsum("lao,lao->l", target, target)[:, None, None]
    rows = jnp.einsum("lna,lma->lnm", a, a) * jnp.einsum("lno,lmo->lnm", g, g)
    gram = jnp.block([[among, across], [jnp.swapaxes(across, 1, 2), rows]])

    def apply(coefficients: Array) -> Array:
        inner = jnp.einsum("lij,lj->li", gram[:, 1:], coefficients) / a.shape[1]
        return damping * coefficients + jnp.pad(inner, ((0, 0), (1, 0)))

    def inner(left: Array, right: Array) -> Array:
        return jnp.einsum("li,lij,lj->l", left, gram, right)

    first = jnp.zeros(gram.shape[:2], gram.dtype).at[:, 0].set(1)
    solved = conjugate_gradient(apply, first, None, inner=inner, **options)

    def spread(coefficients: Array) -> Array:
        of_rows = jnp.einsum("lna,lno->lao", a * coefficients[:, 1:, None], g)
        return coefficients[:, 0, None, None] * target + of_rows

    return solved._replace(x=spread(solved.x), residual=spread(solved.residual))
