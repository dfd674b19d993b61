"""Arrays that are computed once, and not again within everything that reads them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def materialized(array: Array) -> Array:
    """The array itself; compiled for CPU, it and its cotangent are stored before anything reads them.

    XLA for CPU fuses a long elementwise formula into each of its readers and so computes it as often as
    it is read, in the backward pass most of all: there a reader that wants it transposed walks through
    it one number after another, without vector instructions (40 ms in the place of 3 for the gradient
    of GELU's moments). `lax.optimization_barrier` does not help, since it is gone before XLA fuses. A
    conditional stays, and it stops fusion; its predicate is hidden from the simplifier by that very
    barrier. Other compilers get the identity.

    Linear, so that it passes `jvp`, `vmap`, `grad`, `checkpoint` and `scan`.
    """
    if not isinstance(array, jax.core.Tracer):
        return array  # nothing is fused outside of a trace
    return jax.lax.platform_dependent(array, cpu=_stored, default=lambda x: x)


def _stored(array: Array) -> Array:
    always = jax.lax.optimization_barrier(jnp.bool_(True))
    return jax.lax.cond(always, lambda x: x, jnp.negative, array)
