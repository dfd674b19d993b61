"""Draws of all weights of a network at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.posterior.base import Posterior


def sample_params(params: Any, key: Array) -> Any:
    """One draw of the weights: the same pytree, with an array in place of every belief.

    The tree is any with `Posterior` leaves, such as `EncoderBlockParams`. Beliefs are drawn
    independently of each other. Other leaves and None are returned unchanged.

    >>> import moment_jax as mj
    >>> kernel = mj.posterior.Factorized(jnp.zeros((2, 3)), jnp.ones((2, 3)))
    >>> draw = sample_params(mj.DenseParams(kernel, bias=None), jax.random.key(0))
    >>> draw.kernel.shape, draw.bias
    ((2, 3), None)
    """
    leaves, treedef = jax.tree.flatten(params, is_leaf=_is_belief)
    keys = jax.random.split(key, max(len(leaves), 1))
    for members in _alike(leaves):
        beliefs = jax.tree.map(lambda *arrays: jnp.stack(arrays), *(leaves[i] for i in members))
        draws = jax.vmap(lambda belief, key: belief.sample(key))(beliefs, keys[np.array(members)])
        for member, draw in zip(members, draws, strict=True):
            leaves[member] = draw
    return jax.tree.unflatten(treedef, leaves)


def _is_belief(leaf: Any) -> bool:
    return isinstance(leaf, Posterior)


def _alike(leaves: list[Any]) -> list[list[int]]:
    """Indices of the leaves that are beliefs, grouped by family and shape.

    A group is drawn in one batch, each member with its own key: one random number generator per leaf of
    a deep network would take minutes to compile.
    """
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if _is_belief(leaf):
            arrays, structure = jax.tree.flatten(leaf)
            kind = (structure, *((jnp.shape(a), jnp.result_type(a)) for a in arrays))
            groups.setdefault(kind, []).append(i)
    return list(groups.values())
