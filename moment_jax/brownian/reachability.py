"""Which tokens lead where: closed classes, irreducibility and the period of a chain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.brownian.operators import Transition, as_operator

Array = jax.Array


@jax.jit
def levels(product: Callable[[Array], Array], start: Array) -> Array:
    """How many steps away each state is from a set (T,) of booleans; -1 where it leads nowhere.

    Args:
      product: `TransitionOperator.backward` for where the set leads, `forward` for what leads to it; a
        `jax.tree_util.Partial`.
      start: (T,) booleans.
    """

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        return jnp.any(state[1])

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        level, front, count = state
        # An indicator's product counts probabilities, all of which are positive or zero.
        reached = product(front.astype(dtype)[:, None])[:, 0] > 0
        new = reached & (level < 0)
        return jnp.where(new, count + 1, level), new, count + 1

    dtype = jnp.result_type(float)
    first = jnp.where(start, 0, -1), start, jnp.zeros((), int)
    return jax.lax.while_loop(unfinished, step, first)[0]


class ChainClasses(NamedTuple):
    """What the zeros of a transition matrix say.

    Attributes:
      recurrent: (T,) booleans: one closed class, which the chain never leaves.
      unique: whether it is the only one; then there is one stationary law, and it lives there.
      irreducible: whether it is all of the chain.
      period: of that class; 1 is aperiodic.
    """

    recurrent: np.ndarray
    unique: bool
    irreducible: bool
    period: int


def chain_classes(transition: Transition) -> ChainClasses:
    """The closed class, its uniqueness and its period, from products with indicators alone.

    A probability counts as zero where it is exactly zero; a softmax in float32 has such zeros where
    scores are 104 below their row's largest. Not for use inside compiled code: the answers are Python's.

    Raises:
      ValueError: if the rows are not probabilities.

    >>> import jax.numpy as jnp
    >>> classes = chain_classes(jnp.array([[0.0, 1.0], [1.0, 0.0]]))
    >>> classes.irreducible, classes.period
    (True, 2)
    """
    steps = as_operator("chain_classes", transition)
    # A chain that is known while other code is traced is looked at all the same.
    with jax.ensure_compile_time_eval():
        state = jnp.zeros(steps.size, bool).at[0].set(True)
        while True:
            ahead = levels(steps.backward, state) >= 0
            behind = levels(steps.forward, state) >= 0
            lost = ahead & ~behind  # reached from the state, and leading back to it no more
            if not jnp.any(lost):
                break
            state = jnp.zeros(steps.size, bool).at[jnp.argmax(lost)].set(True)
        return ChainClasses(
            np.asarray(ahead),
            bool(jnp.all(behind)),
            bool(jnp.all(ahead)),
            _period(steps.backward, levels(steps.backward, state)),
        )


def _period(backward: Callable[[Array], Array], level: Array) -> int:
    """The greatest common divisor of level_i + 1 - level_j over the steps i -> j of a class."""
    period = 0
    for depth in range(int(jnp.max(level)) + 1):
        reached = backward((level == depth).astype(jnp.result_type(float))[:, None])[:, 0] > 0
        for other in np.unique(np.asarray(level)[np.asarray(reached)]):
            period = math.gcd(period, depth + 1 - int(other))
        if period == 1:
            break
    return period
