"""Inputs of the library, safe from a fault of XLA for CPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from moment_jax.xla.materialize import materialized

P = ParamSpec("P")
R = TypeVar("R")

_now = threading.local()


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
        if getattr(_now, "inside", False):
            return transform(*args, **kwargs)
        args, kwargs = _stored((args, kwargs))
        _now.inside = True
        try:
            return transform(*args, **kwargs)
        finally:
            _now.inside = False

    return stored


def _stored(tree: Any) -> Any:
    """With its arrays `materialized`; what forms its fields later is made of stored arrays already."""
    nodes, structure = jax.tree.flatten(tree, is_leaf=_forms_later)
    plain = iter(materialized([node for node in nodes if not _forms_later(node)]))
    stored = [node if _forms_later(node) else next(plain) for node in nodes]
    return jax.tree.unflatten(structure, stored)


def _forms_later(node: Any) -> bool:
    return bool(getattr(node, "forms_later", False))
