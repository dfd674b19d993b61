"""Arrays that are computed once, and not again within everything that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from moment_jax.xla.kernel_choice import on_chip

Array = jax.Array
T = TypeVar("T")

_store = Primitive("materialize")


def materialized(tree: T) -> T:
    """The tree itself; compiled for CPU, its arrays and cotangents are stored before they are read.

    XLA for CPU fuses a long elementwise formula into each of its readers and so computes it as often as
    it is read, in the backward pass most of all: there a reader that wants it transposed walks through
    it one number after another, without vector instructions (40 ms in the place of 3 for the gradient
    of GELU's moments). `lax.optimization_barrier` does not help, since it is gone before XLA fuses. A
    conditional stays, and it stops fusion; its predicate is hidden from the simplifier by that very
    barrier, and so is that its branches are the same. Either gives its operand, so nothing is copied.
    Other compilers get the identity, as does whatever is not compiled. In the body of a kernel it is
    nothing at all.

    A primitive of its own, since the same made of JAX's operations is traced four times over by every
    transformation. Linear, so that it passes `jvp`, `vmap`, `grad`, `checkpoint` and `scan`.

    Args:
      tree: an array, or a pytree of which the floating-point arrays are meant. Constants are stored too.
        All are computed where one is used.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if _is_float(leaf)]
    if not arrays or on_chip():
        return tree
    same = iter(_store.bind(*arrays))
    return jax.tree.unflatten(structure, [next(same) if _is_float(x) else x for x in leaves])


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _on_cpu(*arrays: Array) -> tuple[Array, ...]:
    always = jax.lax.optimization_barrier(jnp.bool_(True))
    return jax.lax.cond(always, lambda *x: x, _hidden, *arrays)


def _hidden(*arrays: Array) -> tuple[Array, ...]:
    return tuple(jax.lax.optimization_barrier(array) for array in arrays)


def _jvp(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
    return _store.bind(*primals), _store_nonzero(tangents)


def _transpose(cotangents: Sequence[Any], *operands: Any) -> list[Any]:
    return _store_nonzero(cotangents)


def _store_nonzero(tangents: Sequence[Any]) -> list[Any]:
    """An array without a tangent stays without."""
    known = [tangent for tangent in tangents if not isinstance(tangent, ad.Zero)]
    stored = iter(_store.bind(*known) if known else ())
    return [tangent if isinstance(tangent, ad.Zero) else next(stored) for tangent in tangents]


_store.multiple_results = True
_store.def_impl(lambda *arrays: list(arrays))
_store.def_abstract_eval(lambda *types: list(types))
ad.primitive_jvps[_store] = _jvp
ad.primitive_transposes[_store] = _transpose
batching.primitive_batchers[_store] = lambda arrays, axes: (_store.bind(*arrays), axes)
mlir.register_lowering(_store, lambda context, *arrays: arrays)
mlir.register_lowering(_store, mlir.lower_fun(_on_cpu, multiple_results=True), platform="cpu")
