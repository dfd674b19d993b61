"""How fast a chain forgets where it began: eigenvalues, mixing, hitting and absorption."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import sparse
from jax.tree_util import Partial

from moment_jax.brownian.checks import check_stochastic
from moment_jax.brownian.krylov import Eigenpairs, Product, leading_eigenpairs, solve
from moment_jax.brownian.markov import DIRECT, stationary
from moment_jax.brownian.operators import Transition, TransitionOperator, as_operator
from moment_jax.brownian.reachability import chain_classes, levels
from moment_jax.xla import diagonal_of

Array = jax.Array

LONGEST = 30
"""`mixing_time` looks at up to 2^LONGEST steps."""


def eigenpairs(transition: Transition, count: int) -> Eigenpairs:
    """The `count` eigenvalues of largest modulus and right eigenvectors (T, count), complex.

    By block Krylov spaces: nothing of size T x T is decomposed. For a reversible chain
    `reversible_eigenpairs` is faster and real.

    Raises:
      ValueError: if rows are not probabilities, or count is not between 1 and T.
    """
    operator = as_operator("eigenpairs", transition)
    _check_count("eigenpairs", count, operator.size)
    return leading_eigenpairs(
        operator.forward, size=operator.size, dtype=operator.dtype, count=count, symmetric=False
    )


def reversible_eigenpairs(transition: Transition, law: Array, count: int) -> Eigenpairs:
    """The same for a reversible chain with this stationary law: real, by the symmetric form.

    S = diag(p)^(1/2) P diag(p)^(-1/2) is symmetric where detailed balance holds. Right eigenvectors come
    back orthonormal in the law, sum_i p_i v_ik v_il = [k = l], the first one constant. States of
    probability zero get 0 in their place.

    Raises:
      ValueError: if rows are not probabilities, count is not between 1 and T, or shapes do not fit.
    """
    operator = as_operator("reversible_eigenpairs", transition)
    _check_count("reversible_eigenpairs", count, operator.size)
    if law.shape != (operator.size,):
        raise ValueError(
            f"`reversible_eigenpairs` needs a law of shape ({operator.size},). Got {tuple(law.shape)}."
        )
    positive = law > 0
    root = jnp.sqrt(jnp.where(positive, law, 1))
    inverse = jnp.where(positive, 1 / root, 0)
    pairs = leading_eigenpairs(
        Partial(_symmetrized, operator.forward, jnp.where(positive, root, 0), inverse),
        size=operator.size,
        dtype=operator.dtype,
        count=count,
        symmetric=True,
    )
    vectors = inverse[:, None] * pairs.vectors
    signs = jnp.where(jnp.sum(law[:, None] * vectors, axis=0) < 0, -1, 1)
    return pairs._replace(vectors=vectors * signs.astype(vectors.dtype)[None, :])


def _symmetrized(forward: Product, root: Array, inverse: Array, vectors: Array) -> Array:
    return root[:, None] * forward(inverse[:, None] * vectors)


def _check_count(name: str, count: int, size: int) -> None:
    if not 1 <= count <= size:
        raise ValueError(f"`{name}` needs 1 <= count <= T. Got {count} for T = {size}.")


def spectral_gap(transition: Transition, law: Array | None = None) -> Array:
    """1 - |lambda_2|: what the chain forgets of its start in a step, at the slowest.

    0 for a periodic or a reducible chain, 1 for T = 1. Its inverse is the relaxation time.

    Args:
      transition: the chain.
      law: the stationary law of a reversible chain, which makes it faster; None for any chain.
    """
    operator = as_operator("spectral_gap", transition)
    if operator.size == 1:
        return jnp.ones((), operator.dtype)
    if law is None:
        values = eigenpairs(operator, 2).values
    else:
        values = reversible_eigenpairs(operator, law, 2).values
    return jnp.maximum(1 - jnp.abs(values[1]), 0)


def mixing_time(transition: Array, law: Array | None = None, *, distance: float = 0.25) -> int:
    """The first step at which every start's law is within `distance` of the stationary one.

    Total variation, sum_j |P^t_ij - p_j| / 2, at the worst start i. Found by doubling and bisection on
    powers of P, so it needs the dense matrix; for larger chains 1 / `spectral_gap` is the scale.

    Returns:
      A Python number; 0 for T = 1. Not for use inside compiled code.

    Raises:
      ValueError: if rows are not probabilities, the chain is periodic or has several closed classes
        (then it never mixes), or it has not mixed after 2^LONGEST steps.
    """
    size = check_stochastic("mixing_time", transition)
    if not 0 < distance < 1:
        raise ValueError(f"`mixing_time` needs 0 < distance < 1. Got {distance}.")
    classes = chain_classes(transition)
    if classes.period > 1 or not classes.unique:
        raise ValueError(
            "`mixing_time` needs an aperiodic chain with one closed class; another never mixes. Got "
            f"period {classes.period}{'' if classes.unique else ' and several closed classes'}. "
            "`lazy(transition)` is never periodic."
        )
    target = stationary(transition) if law is None else law

    def far(power: Array) -> bool:
        return bool(jnp.max(jnp.sum(jnp.abs(power - target[None, :]), axis=1)) / 2 > distance)

    current = jnp.eye(size, dtype=transition.dtype)
    if not far(current):
        return 0
    powers = [transition]
    while far(powers[-1]):
        if len(powers) > LONGEST:
            raise ValueError(
                f"`mixing_time` found a distance above {distance} after 2^{LONGEST} steps. The chain "
                "hardly mixes; see 1 / spectral_gap(transition)."
            )
        powers.append(powers[-1] @ powers[-1])
    steps = 0  # the largest number of steps after which it is still far
    for i, power in reversed(list(enumerate(powers[:-1]))):
        further = current @ power
        if far(further):
            current, steps = further, steps + 2**i
    return steps + 1


def hitting_times(transition: Transition, target: Array) -> Array:
    """Expected number of steps until a set of states is reached, from every state: (T,).

    0 in the set, +inf where the chain may never come there.

    Args:
      transition: the chain.
      target: the set, (T,) booleans.

    Raises:
      ValueError: if rows are not probabilities, or the set is of another shape.
    """
    operator, inside = _chain_and_set("hitting_times", transition, target)
    missed = levels(operator.forward, inside) < 0
    # From where the chain can get lost before it comes to the set.
    lost = levels(Partial(_outside, operator.forward, inside), missed) >= 0
    waiting = ~inside & ~lost
    ones = waiting.astype(operator.dtype)
    times = _solve_waiting(transition, operator, ones, ones)
    return jnp.where(lost, jnp.inf, jnp.where(waiting, times, 0))


def absorption_probabilities(transition: Transition, target: Array) -> Array:
    """Probability that the chain ever comes to a set of states, from every state: (T,).

    For an absorbing token, or a closed class of tokens, it is the share of the walks that end there:
    under a causal mask, what part of each token's attention, followed to the end, falls on the first.

    Args:
      transition: the chain.
      target: the set, (T,) booleans.

    Returns:
      (T,): 1 in the set, 0 where no path leads to it.

    Raises:
      ValueError: if rows are not probabilities, or the set is of another shape.

    >>> import jax.numpy as jnp
    >>> gamble = jnp.array([[1.0, 0, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0, 1.0]])
    >>> won = absorption_probabilities(gamble, jnp.array([False, False, False, True]))
    >>> print([f"{p:.3f}" for p in won])
    ['0.000', '0.333', '0.667', '1.000']
    """
    operator, inside = _chain_and_set("absorption_probabilities", transition, target)
    waiting = ~inside & (levels(operator.forward, inside) >= 0)
    ones = waiting.astype(operator.dtype)
    arriving = ones * operator.forward(inside.astype(operator.dtype)[:, None])[:, 0]
    shares = _solve_waiting(transition, operator, ones, arriving)
    return jnp.where(inside, 1, jnp.where(waiting, jnp.clip(shares, 0, 1), 0))


def _chain_and_set(
    name: str, transition: Transition, target: Array
) -> tuple[TransitionOperator, Array]:
    operator = as_operator(name, transition)
    inside = jnp.asarray(target)
    if inside.shape != (operator.size,) or inside.dtype != bool:
        raise ValueError(
            f"`{name}` needs a target of ({operator.size},) booleans. Got "
            f"{tuple(inside.shape)} of {inside.dtype}."
        )
    return operator, inside


def _solve_waiting(
    transition: Transition, operator: TransitionOperator, ones: Array, right: Array
) -> Array:
    """(I - Q)^-1 right, Q the steps between the states that still wait, where `ones` is 1."""
    if isinstance(transition, jax.Array) and operator.size <= DIRECT:
        kept = ones[:, None] * transition * ones[None, :]
        return jnp.linalg.solve(jnp.eye(operator.size, dtype=kept.dtype) - kept, right)
    return solve(Partial(_waiting, operator.forward, ones), right).x


def _outside(forward: Product, inside: Array, vectors: Array) -> Array:
    return jnp.where(inside[:, None], 0, forward(vectors))


def _waiting(forward: Product, ones: Array, times: Array) -> Array:
    """(I - Q) h, Q the steps between states that are still waiting."""
    return times - ones * forward((ones * times)[:, None])[:, 0]


def absorbing(transition: Array | sparse.BCOO, *, tolerance: float = 1e-6) -> Array:
    """Which tokens the chain does not leave, P_ii >= 1 - tolerance: (T,) booleans.

    The first token of a causal mask is one; a token on which all attention of its own query falls too.

    Raises:
      ValueError: if rows are not probabilities.
    """
    size = check_stochastic("absorbing", transition)
    if isinstance(transition, sparse.BCOO):
        row, column = transition.indices[:, 0], transition.indices[:, 1]
        stay = jnp.zeros(size, transition.dtype).at[row].add(transition.data * (row == column))
    else:
        stay = diagonal_of(transition)
    return stay >= 1 - tolerance
