"""What XLA has to be told: arrays to store on CPU, and diagonals in few operations; no mathematics.

Values and derivatives equal those of the plain JAX operation on every platform. The docstring of a
function says which compiler needs it and what it saves. A compiler fault has a test that shows the fault
itself, so that its workaround can go when the fault does.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir, partial_eval

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

inlined = functools.partial(jax.jit, inline=True)
"""Decorator of a function that is one program outside of compiled code, and its operations inside.

Outside, JAX compiles each operation for each shape by itself, for 20 ms or more.
"""

_now = threading.local()  # while tracing: `in_transform`
_store = Primitive("materialize")


def materialized(tree: T) -> T:
    """Identity; on CPU it also stops XLA from fusing across it, forward and backward.

    XLA for CPU fuses a long elementwise formula into each of its readers, and so recomputes it once per
    reader. A reader that wants the transpose then runs without vector instructions: the gradient of
    GELU's moments takes 40 ms instead of 3. `lax.optimization_barrier` does not help because XLA
    removes it before fusing. A conditional survives and blocks fusion. Barriers on its predicate and on
    one branch keep the simplifier from removing it. Both branches return their operand, so nothing is
    copied. The identity elsewhere: on other platforms, and outside jit.

    A primitive, because the same thing of JAX operations is traced four times by every transformation.
    Of a pytree only floating-point arrays are stored, constants included; using one computes all.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if _is_float(leaf)]
    if not arrays:
        return tree
    same = iter(_store.bind(*arrays))
    return jax.tree.unflatten(structure, [next(same) if _is_float(x) else x for x in leaves])


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _on_cpu(_context: Any, *arrays: ir.Value) -> Sequence[ir.Value]:
    always: Any = stablehlo.optimization_barrier([mlir.ir_constant(np.bool_(True))])
    branches = stablehlo.IfOp([array.type for array in arrays], always)
    with ir.InsertionPoint(branches.true_branch.blocks.append()):
        stablehlo.return_(arrays)
    with ir.InsertionPoint(branches.false_branch.blocks.append()):
        hidden: Any = stablehlo.optimization_barrier(arrays)
        stablehlo.return_([hidden] if len(arrays) == 1 else hidden)
    results: Sequence[ir.Value] = branches.results
    return results


def _store_nonzero(tangents: Sequence[Any]) -> list[Any]:
    """Store the tangents; symbolic zeros stay symbolic."""
    known = [tangent for tangent in tangents if not isinstance(tangent, ad.Zero)]
    stored = iter(_store.bind(*known) if known else ())
    return [tangent if isinstance(tangent, ad.Zero) else next(stored) for tangent in tangents]


def _without_unused(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Drop the arrays that no one reads; a scan cannot transpose their zero cotangents."""
    equation = rest[-1]  # some releases pass more before it
    if not any(used):
        return used, None
    kept = [
        [variable for variable, wanted in zip(variables, used, strict=True) if wanted]
        for variables in (equation.invars, equation.outvars)
    ]
    return used, equation.replace(invars=kept[0], outvars=kept[1])


_store.multiple_results = True
_store.def_impl(lambda *arrays: list(arrays))
_store.def_abstract_eval(lambda *types: list(types))
ad.primitive_jvps[_store] = lambda at, tangents: (_store.bind(*at), _store_nonzero(tangents))
ad.primitive_transposes[_store] = lambda cotangents, *_: _store_nonzero(cotangents)
partial_eval.dce_rules[_store] = _without_unused
batching.primitive_batchers[_store] = lambda arrays, axes: (_store.bind(*arrays), axes)
mlir.register_lowering(_store, lambda context, *arrays: arrays)
mlir.register_lowering(_store, _on_cpu, platform="cpu")


def materialized_inputs(transform: Callable[P, R]) -> Callable[P, R]:
    """Decorate a transform so that its floating-point inputs are `materialized`.

    All public transforms have it. jaxlib 0.10.2 to 0.12.0 miscompile `jnp.sum(x @ jnp.full((64, 64),
    0.01), axis=0)` for CPU: where a product whose right operand is ONE broadcast number is fused with a
    reduction, it reads something else (`tests/xla/test_compiler_fault.py`). Such operands come from
    outside, or from full, ones or zeros inside `jit`. Storing them avoids the fault, in derivatives too.
    If a transform makes such an array itself and multiplies by it from the right, it must materialize it
    there. Only the outermost transform stores; nested ones receive stored arrays.
    """

    @functools.wraps(transform)
    def stored(*args: P.args, **kwargs: P.kwargs) -> R:
        if getattr(_now, "in_transform", False):
            return transform(*args, **kwargs)
        args, kwargs = materialized((args, kwargs))
        _now.in_transform = True
        try:
            return transform(*args, **kwargs)
        finally:
            _now.in_transform = False

    return stored


@inlined
def diagonal_of(matrix: Array) -> Array:
    """The diagonals (..., D) of matrices (..., D, E >= D), as a masked sum.

    `jnp.diagonal` takes 32 operations. A strided slice would be read inside whatever uses it, which
    computes the matrix again for each of its entries. On a TPU it would move every entry to a new tile.
    """
    kept = jnp.where(on_diagonal(matrix.shape), matrix, jnp.zeros((), matrix.dtype))
    return jnp.sum(kept, axis=-1)


@inlined
def diagonal_matrix(entries: Array) -> Array:
    """Diagonal matrices (..., D, D) with these diagonals (..., D)."""
    shape = (*entries.shape, entries.shape[-1])
    # A selection: in a product with the identity, inf * 0 would be NaN.
    return jnp.where(on_diagonal(shape), entries[..., None, :], jnp.zeros((), entries.dtype))


@functools.partial(inlined, static_argnums=0)
def on_diagonal(shape: tuple[int, ...]) -> Array:
    """A boolean mask of the diagonal, (..., D, D)."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - back) for back in (2, 1))
    return row == column


def with_automatic_axes(fn: Callable[..., Any], inputs: Any, batch_axes: int) -> Any:
    """`fn(inputs)`, in which a mesh's explicit axes are left to XLA.

    Explicit axes ask for the sharding of every reshape. Results are sharded along the batch axes.
    """
    kinds = (jax.typeof(x).sharding for x in jax.tree.leaves(inputs))
    explicit = (s for s in kinds if jax.sharding.AxisType.Explicit in (s.mesh.axis_types or ()))
    found = next(explicit, None)
    if found is None:
        return fn(inputs)
    spec = jax.sharding.PartitionSpec(*found.spec[:batch_axes])
    out = jax.sharding.NamedSharding(found.mesh, spec)
    # As one program: single operations know nothing of the mesh.
    return jax.jit(jax.sharding.auto_axes(fn, out_sharding=out))(inputs)
