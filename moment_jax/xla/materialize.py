"""Arrays that are computed once, and not again within everything that reads them."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
T = TypeVar("T")


def materialized(tree: T) -> T:
    """The tree itself; compiled for CPU, its arrays and cotangents are stored before they are read.

    XLA for CPU fuses a long elementwise formula into each of its readers and so computes it as often as
    it is read, in the backward pass most of all: there a reader that wants it transposed walks through
    it one number after another, without vector instructions (40 ms in the place of 3 for the gradient
    of GELU's moments). `lax.optimization_barrier` does not help, since it is gone before XLA fuses. A
    conditional stays, and it stops fusion; its predicate is hidden from the simplifier by that very
    barrier, and so is that its branches are the same. Either gives its operand, so nothing is copied.
    Other compilers get the identity.

    Linear, so that it passes `jvp`, `vmap`, `grad`, `checkpoint` and `scan`.

    Args:
      tree: an array, or a pytree of which the floating-point arrays are meant. Constants are stored too.
    """
    always = jax.lax.optimization_barrier(jnp.bool_(True))
    if not isinstance(always, jax.core.Tracer):
        return tree  # nothing is fused outside of a compiled program
    leaves, structure = jax.tree.flatten(tree)

    def stored(*arrays: Array) -> tuple[Array, ...]:
        return jax.lax.cond(always, lambda *x: x, _hidden, *arrays)

    arrays = [leaf for leaf in leaves if _is_float(leaf)]
    same = iter(jax.lax.platform_dependent(*arrays, cpu=stored, default=lambda *x: x))
    return jax.tree.unflatten(structure, [next(same) if _is_float(x) else x for x in leaves])


def _hidden(*arrays: Array) -> tuple[Array, ...]:
    # One by one, so that an array without a tangent stays without.
    return tuple(jax.lax.optimization_barrier(array) for array in arrays)


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)
