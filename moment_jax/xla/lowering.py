"""What is done one way on one platform: arrays stored on CPU, kernels of Pallas on TPU."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Array = jax.Array
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Path = Literal["xla", "tpu", "interpret"]

_now = threading.local()  # path: of `kernels`; in_kernel, in_transform: what is being traced
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


def materialized_inputs(transform: Callable[P, R]) -> Callable[P, R]:
    """The transform with its floating-point inputs `materialized`; every public one is made so.

    jaxlib 0.10.2 to 0.12.0 compile `jnp.sum(x @ jnp.full((64, 64), 0.01), axis=0)` for CPU wrongly:
    where a product is fused with a reduction and its right operand is ONE number broadcast, what is read
    is not the operand (`tests/xla/test_compiler_fault.py`). Such arrays come from outside, as constants
    or made inside `jit` by full, ones or zeros: variances of a fresh network, kernels, a covariance of
    zeros. Stored, they are arrays like any other, and so is all that is computed from them, derivatives
    included. What a transform makes itself and multiplies from the right has to be materialized there.

    The outermost transform stores; those that it calls get what is stored already.
    """

    @functools.wraps(transform)
    def stored(*args: P.args, **kwargs: P.kwargs) -> R:
        if getattr(_now, "in_transform", False):
            return transform(*args, **kwargs)
        # What forms its fields later is made of stored arrays already.
        nodes, structure = jax.tree.flatten((args, kwargs), is_leaf=_forms_later)
        plain = iter(materialized([node for node in nodes if not _forms_later(node)]))
        nodes = [node if _forms_later(node) else next(plain) for node in nodes]
        args, kwargs = jax.tree.unflatten(structure, nodes)
        _now.in_transform = True
        try:
            return transform(*args, **kwargs)
        finally:
            _now.in_transform = False

    return stored


def _forms_later(node: Any) -> bool:
    return bool(getattr(node, "forms_later", False))


@contextlib.contextmanager
def kernels(path: Path | None) -> Iterator[None]:
    """What is traced inside takes this path; a function that `jit` has traced before stays as it is.

    Args:
      path: "xla" for the compiler's program, which has derivatives of every order and mode (a kernel has
        reverse mode alone, once); "tpu" for the kernel, where one process compiles for another's TPU or
        every device runs the program alone; "interpret" for the kernel run by XLA, for tests; None for
        the choice of `kernel_path`.
    """
    before, _now.path = getattr(_now, "path", None), path
    try:
        yield
    finally:
        _now.path = before


def kernel_path() -> Path:
    """The path that `kernels` names, or else the kernel where the only device is a TPU.

    With several devices the compiler may have to partition the program, and it leaves kernels whole.
    """
    path: Path | None = getattr(_now, "path", None)
    if path is not None:
        return path
    return "tpu" if jax.default_backend() == "tpu" and jax.device_count() == 1 else "xla"


def default_precision() -> str | None:
    """What `jax.default_matmul_precision` was told; None for nothing."""
    config: Any = jax.config  # whose stubs lack this setting
    asked: str | None = config.jax_default_matmul_precision
    return asked


@contextlib.contextmanager
def inside_a_kernel() -> Iterator[None]:
    """While the body of a kernel is traced: its arrays are on the chip, and its products in float32.

    A setting of `jax_default_matmul_precision` is kept: one pass of bfloat16, or float32.
    """
    # Mosaic knows no precision between them.
    low = default_precision() in ("bfloat16", "default", "fastest")
    before, _now.in_kernel = on_chip(), True
    try:
        with jax.default_matmul_precision("default" if low else "highest"):
            yield
    finally:
        _now.in_kernel = before


def on_chip() -> bool:
    """Whether the body of a kernel is being traced."""
    return getattr(_now, "in_kernel", False)
