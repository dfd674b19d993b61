"""Markov chains over tokens: classes, stationary laws, reversibility, spectra and mixing times."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.sparse import csgraph, csr_array

from moment_jax.brownian.checks import check_stochastic
from moment_jax.brownian.krylov import Eigenpairs, leading_eigenpairs

LONGEST = 30
"""`mixing_time` gives up after 2^LONGEST steps."""


class ChainClasses(NamedTuple):
    """The class structure of a chain, from the zeros of its transition matrix.

    Attributes:
      recurrent: (T,) booleans: a closed class, which the chain never leaves.
      unique: whether it is the only one; then it carries the unique stationary law.
      period: of that class; 1 for aperiodic.
    """

    recurrent: np.ndarray
    unique: bool
    period: int


def chain_classes(transition: Array) -> ChainClasses:
    """A closed class of a chain (T, T), whether it is the only one, and its period.

    Only exact zeros count as zero. A softmax in float32 has them where scores are 104 below the largest
    of their row. Not for use inside compiled code.

    Raises:
      ValueError: if the rows are not probabilities.

    >>> import jax.numpy as jnp
    >>> chain_classes(jnp.array([[0.0, 1.0], [1.0, 0.0]])).period
    2
    """
    check_stochastic("chain_classes", transition)
    steps = np.asarray(transition) > 0
    count, label = csgraph.connected_components(csr_array(steps), connection="strong")
    source, target = np.nonzero(steps)
    leaves = np.zeros(count, bool)
    leaves[label[source[label[source] != label[target]]]] = True
    closed = np.flatnonzero(~leaves)
    recurrent = label == closed[0]
    # The period is the greatest common divisor of level_i + 1 - level_j over the class's steps i -> j.
    steps = steps[np.ix_(recurrent, recurrent)]
    level = csgraph.shortest_path(csr_array(steps), unweighted=True, indices=0).astype(int)
    source, target = np.nonzero(steps)
    period = math.gcd(*np.unique(level[source] + 1 - level[target]).tolist())
    return ChainClasses(recurrent, len(closed) == 1, period)


def stationary(transition: Array) -> Array:
    """The stationary law p = P^T p, (T,), of a chain (T, T) with one closed class.

    Solves (I - P^T + u 1^T) p = u with the uniform law u. States outside the class, as under a causal
    mask, get zero. A periodic chain has a stationary law too, but need not converge to it.

    Inside compiled code nothing is checked; the result is arbitrary if there are several closed classes.

    Returns:
      (T,), nonnegative, of sum one.

    Raises:
      ValueError: if rows are not probabilities, or the chain has more than one closed class.

    >>> import jax.numpy as jnp
    >>> print([f"{p:.3f}" for p in stationary(jnp.array([[0.5, 0.5], [1.0, 0.0]]))])
    ['0.667', '0.333']
    """
    size = check_stochastic("stationary", transition)
    if not isinstance(transition, jax.core.Tracer):
        classes = chain_classes(transition)
        if not classes.unique:
            raise ValueError(
                "`stationary` needs a chain with one closed class; otherwise the law depends on the "
                f"start. One class has {int(classes.recurrent.sum())} of {size} states, and some states "
                "never reach it. Use one class alone (`chain_classes`), or connect the chain, for "
                "instance by 0.99 P + 0.01 / T."
            )
    uniform = jnp.full(size, 1 / size, transition.dtype)
    matrix = jnp.eye(size, dtype=transition.dtype) - transition.T + uniform[:, None]
    law = jnp.maximum(jnp.linalg.solve(matrix, uniform), 0)
    return law / jnp.sum(law)


def detailed_balance_gap(transition: Array, law: Array) -> Array:
    """sum_ij |p_i P_ij - p_j P_ji| / 2, the net flow around the chain: 0 if reversible, below 1.

    Args:
      transition: (T, T).
      law: the stationary law, (T,).

    Raises:
      ValueError: if rows are not probabilities or shapes do not fit.
    """
    _check_law("detailed_balance_gap", transition, law)
    flow = law[:, None] * transition
    return jnp.sum(jnp.abs(flow - flow.T)) / 2


def entropy_rate(transition: Array, law: Array) -> Array:
    """-sum_i p_i sum_j P_ij log P_ij in nats, from 0 (deterministic) to log T (uniform).

    Args and errors are those of `detailed_balance_gap`.
    """
    _check_law("entropy_rate", transition, law)
    return jnp.sum(law * jnp.sum(jax.scipy.special.entr(transition), axis=1))


def _check_law(name: str, transition: Array, law: Array) -> None:
    """Raise unless rows are probabilities and the law is (T,)."""
    size = check_stochastic(name, transition)
    if law.shape != (size,):
        raise ValueError(f"`{name}` needs a law of shape ({size},). Got {tuple(law.shape)}.")


def eigenpairs(transition: Array, count: int) -> Eigenpairs:
    """The `count` eigenvalues of largest modulus and right eigenvectors (T, count), complex.

    By block Krylov spaces, without a dense decomposition.

    Raises:
      ValueError: if rows are not probabilities, or count is not between 1 and T.
    """
    size = check_stochastic("eigenpairs", transition)
    if not 1 <= count <= size:
        raise ValueError(f"`eigenpairs` needs 1 <= count <= T. Got {count} for T = {size}.")
    return leading_eigenpairs(transition, count=count, symmetric=False)


def spectral_gap(transition: Array) -> Array:
    """1 - |lambda_2|, the slowest rate at which the chain forgets its start.

    0 for a periodic or a reducible chain, 1 for T = 1. Its inverse is the relaxation time.
    """
    if check_stochastic("spectral_gap", transition) == 1:
        return jnp.ones((), transition.dtype)
    return jnp.maximum(1 - jnp.abs(eigenpairs(transition, 2).values[1]), 0)


def mixing_time(transition: Array, *, distance: float = 0.25) -> int:
    """The first step at which every start's law is within `distance` of the stationary one.

    The distance is total variation, sum_j |P^t_ij - p_j| / 2, at the worst start i. The step is found by
    doubling and bisection on powers of P.

    Returns:
      A Python int; 0 for T = 1. Not for use inside compiled code.

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
            "`mixing_time` needs an aperiodic chain with one closed class; others never mix. Got "
            f"period {classes.period}{'' if classes.unique else ' and several closed classes'}. "
            "(I + P) / 2 is never periodic."
        )
    target = stationary(transition)

    def far(power: Array) -> bool:
        return bool(jnp.max(jnp.sum(jnp.abs(power - target[None, :]), axis=1)) / 2 > distance)

    current = jnp.eye(size, dtype=transition.dtype)
    if not far(current):
        return 0
    powers = [transition]
    while far(powers[-1]):
        if len(powers) > LONGEST:
            raise ValueError(
                f"`mixing_time` found a distance above {distance} after 2^{LONGEST} steps. See "
                "1 / spectral_gap(transition)."
            )
        powers.append(powers[-1] @ powers[-1])
    steps = 0  # the last step that is still too far
    for i, power in reversed(list(enumerate(powers[:-1]))):
        further = current @ power
        if far(further):
            current, steps = further, steps + 2**i
    return steps + 1
