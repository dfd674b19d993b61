"""Eigenvalues, spectral gaps and mixing times of Markov chains."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moment_jax.brownian.checks import check_stochastic
from moment_jax.brownian.krylov import Eigenpairs, leading_eigenpairs
from moment_jax.brownian.markov import chain_classes, stationary

Array = jax.Array

LONGEST = 30
"""`mixing_time` gives up after 2^LONGEST steps."""


def eigenpairs(transition: Array, count: int) -> Eigenpairs:
    """The `count` eigenvalues of largest modulus and right eigenvectors (T, count), complex.

    By block Krylov spaces, without a dense decomposition. For a reversible chain use
    `reversible_eigenpairs`, which is real and faster.

    Raises:
      ValueError: if rows are not probabilities, or count is not between 1 and T.
    """
    _check_count("eigenpairs", count, check_stochastic("eigenpairs", transition))
    return leading_eigenpairs(transition, count=count, symmetric=False)


def reversible_eigenpairs(transition: Array, law: Array, count: int) -> Eigenpairs:
    """`eigenpairs` of a reversible chain with this stationary law: real, by the symmetric form.

    S = diag(p)^(1/2) P diag(p)^(-1/2) is symmetric if detailed balance holds. The right eigenvectors are
    orthonormal in the law, sum_i p_i v_ik v_il = [k = l], and the first one is constant. They are 0 at
    states of probability zero.

    Raises:
      ValueError: if rows are not probabilities, count is not between 1 and T, or shapes do not fit.
    """
    size = check_stochastic("reversible_eigenpairs", transition)
    _check_count("reversible_eigenpairs", count, size)
    if law.shape != (size,):
        raise ValueError(
            f"`reversible_eigenpairs` needs a law of shape ({size},). Got {tuple(law.shape)}."
        )
    positive = law > 0
    root = jnp.sqrt(jnp.where(positive, law, 0))
    inverse = jnp.where(positive, 1 / jnp.where(positive, root, 1), 0)
    symmetric = root[:, None] * transition * inverse[None, :]
    pairs = leading_eigenpairs(symmetric, count=count, symmetric=True)
    vectors = inverse[:, None] * pairs.vectors
    signs = jnp.where(jnp.sum(law[:, None] * vectors, axis=0) < 0, -1, 1)
    return pairs._replace(vectors=vectors * signs.astype(vectors.dtype)[None, :])


def _check_count(name: str, count: int, size: int) -> None:
    if not 1 <= count <= size:
        raise ValueError(f"`{name}` needs 1 <= count <= T. Got {count} for T = {size}.")


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
