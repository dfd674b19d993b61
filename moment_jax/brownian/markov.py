"""Markov chains over tokens: steps, stationary laws, reversibility and entropy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jax.tree_util import Partial

from moment_jax.brownian.checks import check_square, check_stochastic
from moment_jax.brownian.krylov import Product, solve
from moment_jax.brownian.operators import Transition, TransitionOperator, as_operator
from moment_jax.brownian.reachability import chain_classes

Array = jax.Array

DIRECT = 1024
"""Dense chains of up to so many states are solved by elimination, larger ones by products."""


def k_step(transition: Array, steps: int) -> Array:
    """P^k, the probabilities of k steps (T, T), by repeated squaring.

    Raises:
      ValueError: if steps is negative, or rows are not probabilities.

    Source: The Brownian motion in the Transformer, section 2.2.
    """
    check_stochastic("k_step", transition)
    _check_steps("k_step", steps)
    return jnp.linalg.matrix_power(transition, steps)


def propagate(transition: Transition, distribution: Array, steps: int = 1) -> Array:
    """The law (T,) of the chain after some steps, (P^T)^k p, by k products.

    Raises:
      ValueError: if steps is negative, shapes do not fit, or rows are not probabilities.

    Source: The Brownian motion in the Transformer, Eq. 4.
    """
    operator = as_operator("propagate", transition)
    _check_steps("propagate", steps)
    if distribution.shape != (operator.size,):
        raise ValueError(
            f"`propagate` needs a distribution of shape ({operator.size},). Got "
            f"{tuple(distribution.shape)}. For several, use jax.vmap."
        )
    return jax.lax.fori_loop(0, steps, lambda _, p: operator.backward(p), distribution[:, None])[
        :, 0
    ]


def _check_steps(name: str, steps: int) -> None:
    if steps < 0:
        raise ValueError(f"`{name}` needs steps >= 0. Got {steps}.")


def stationary(transition: Transition) -> Array:
    """The stationary law p = P^T p, (T,), of a chain with one closed class.

    States outside that class, as under a causal mask, get zero. A periodic chain has one too, though
    its own law need not tend to it. (I - P^T + u 1^T) p = u with the uniform law u is solved, by
    elimination for dense chains of at most `DIRECT` states, else by GMRES on products.

    Inside compiled code nothing is looked at: there a chain with several closed classes gets an
    arbitrary vector.

    Returns:
      (T,), nonnegative, of sum one; for T = 1 it is [1].

    Raises:
      ValueError: if rows are not probabilities, or the chain has more than one closed class.
      ArithmeticError: if the products did not converge.

    >>> import jax.numpy as jnp
    >>> print([f"{p:.3f}" for p in stationary(jnp.array([[0.5, 0.5], [1.0, 0.0]]))])
    ['0.667', '0.333']
    """
    operator = as_operator("stationary", transition)
    if not _is_traced(operator):
        classes = chain_classes(transition)
        if not classes.unique:
            raise ValueError(
                "`stationary` needs a chain with one closed class: its law depends on the start "
                f"otherwise. One class has {int(classes.recurrent.sum())} of {operator.size} states, "
                "and some states never reach it. Take one class alone (`chain_classes`), or connect "
                "the chain, for instance with 0.99 P + 0.01 / T."
            )
    size, dtype = operator.size, operator.dtype
    uniform = jnp.full(size, 1 / size, dtype)
    if isinstance(transition, jax.Array) and size <= DIRECT:
        matrix = jnp.eye(size, dtype=dtype) - transition.T + uniform[:, None]
        law = jnp.linalg.solve(matrix, uniform)
    else:
        law, residual = solve(Partial(_balance, operator.backward), uniform)
        if (
            not isinstance(residual, jax.core.Tracer)
            and residual > size * 1e3 * jnp.finfo(dtype).eps
        ):
            raise ArithmeticError(
                f"`stationary` did not converge: {float(residual):.1e} is left over. The chain mixes "
                "too slowly for products; give it dense and up to moment_jax.brownian.markov.DIRECT "
                "states, or in float64."
            )
    law = jnp.maximum(law, 0)
    return law / jnp.sum(law)


def _balance(backward: Product, law: Array) -> Array:
    """(I - P^T + u 1^T) p."""
    return law - backward(law[:, None])[:, 0] + jnp.sum(law) / law.shape[0]


def _is_traced(operator: TransitionOperator) -> bool:
    leaves = jax.tree.leaves((operator.forward, operator.backward))
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def kernel_stationary(kernel: Array) -> Array:
    """The stationary law of a symmetric kernel's chain: its row sums over their total, (T,).

    The chain `row_normalize(kernel)` is then reversible.

    Raises:
      ValueError: if the kernel is not square, or (outside compiled code) not symmetric.
    """
    check_square("kernel_stationary", kernel)
    if not isinstance(kernel, jax.core.Tracer) and not np.allclose(kernel, kernel.T):
        gap = np.abs(np.asarray(kernel) - np.asarray(kernel).T).max()
        raise ValueError(
            "`kernel_stationary` needs a symmetric kernel. The largest |k - k^T| is "
            f"{gap:.3g}. Use `stationary(row_normalize(kernel))`."
        )
    sums = jnp.sum(kernel, axis=1)
    return sums / jnp.sum(sums)


def detailed_balance_gap(transition: Array | sparse.BCOO, law: Array) -> Array:
    """sum_ij |p_i P_ij - p_j P_ji| / 2: the net flow around the chain, 0 if it is reversible, below 1.

    Args:
      transition: (T, T), dense or sparse.
      law: the stationary law, (T,).

    Raises:
      ValueError: if rows are not probabilities or shapes do not fit.
    """
    _check_law("detailed_balance_gap", transition, law)
    if isinstance(transition, sparse.BCOO):
        indices = transition.indices
        flow = law[indices[:, 0]] * transition.data
        net = sparse.BCOO(
            (jnp.concatenate([flow, -flow]), jnp.concatenate([indices, indices[:, ::-1]])),
            shape=transition.shape,
        ).sum_duplicates(nse=2 * indices.shape[0])
        return jnp.sum(jnp.abs(net.data)) / 2
    flow = law[:, None] * transition
    return jnp.sum(jnp.abs(flow - flow.T)) / 2


def entropy_rate(transition: Array | sparse.BCOO, law: Array) -> Array:
    """-sum_i p_i sum_j P_ij log P_ij in nats: between 0 (no choice) and log T (attends everywhere).

    Args:
      transition: (T, T), dense or sparse.
      law: the stationary law, (T,).

    Raises:
      ValueError: if rows are not probabilities or shapes do not fit.
    """
    _check_law("entropy_rate", transition, law)
    if isinstance(transition, sparse.BCOO):
        rows = law[transition.indices[:, 0]]
        return jnp.sum(rows * jax.scipy.special.entr(transition.data))
    return jnp.sum(law * jnp.sum(jax.scipy.special.entr(transition), axis=1))


def _check_law(name: str, transition: Array | sparse.BCOO, law: Array) -> None:
    """Raise unless rows are probabilities, and the law one number for each."""
    size = check_stochastic(name, transition)
    if law.shape != (size,):
        raise ValueError(f"`{name}` needs a law of shape ({size},). Got {tuple(law.shape)}.")
