"""Registration of beliefs as pytrees whose shapes are checked when made by hand, and only then."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import jax

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def register_belief(cls: type[T]) -> type[T]:
    """Register a frozen dataclass, all fields arrays, as a pytree that is rebuilt without checks.

    `jax.tree_util.register_dataclass` would rebuild by the constructor, whose check of shapes stops
    transformations that have every right to other leaves: `jacfwd` and `hessian` put axes last,
    `vmap(out_axes=1)` in the middle, and factored optimisers summarise each array.
    """
    names = tuple(field.name for field in dataclasses.fields(cls))

    def flatten_with_keys(belief: T) -> tuple[list[tuple[object, object]], None]:
        return [(jax.tree_util.GetAttrKey(name), getattr(belief, name)) for name in names], None

    def flatten(belief: T) -> tuple[list[object], None]:
        return [getattr(belief, name) for name in names], None

    def unflatten(_: None, leaves: Iterable[object]) -> T:
        belief = object.__new__(cls)
        for name, leaf in zip(names, leaves, strict=True):
            object.__setattr__(belief, name, leaf)  # the dataclass is frozen
        return belief

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
