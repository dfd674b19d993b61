"""Registration of dataclasses of arrays as pytrees whose fields are checked when made by hand alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import jax
from jax import export

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def register_fields(cls: type[T]) -> type[T]:
    """Register a frozen dataclass, all fields arrays, as a pytree that is rebuilt without checks.

    `jax.tree_util.register_dataclass` would rebuild by the constructor, whose check of shapes stops
    transformations that have every right to other leaves: `jacfwd` and `hessian` put axes last,
    `vmap(out_axes=1)` in the middle, and factored optimisers summarise each array.

    Functions that take or give it can be saved with `jax.export`.
    """
    names = tuple(field.name for field in dataclasses.fields(cls))

    def flatten_with_keys(instance: T) -> tuple[list[tuple[object, object]], None]:
        return [(jax.tree_util.GetAttrKey(name), getattr(instance, name)) for name in names], None

    def flatten(instance: T) -> tuple[list[object], None]:
        return [getattr(instance, name) for name in names], None

    def unflatten(_: None, leaves: Iterable[object]) -> T:
        instance = object.__new__(cls)
        for name, leaf in zip(names, leaves, strict=True):
            object.__setattr__(instance, name, leaf)  # the dataclass is frozen
        return instance

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"moment_jax.{cls.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: None,
    )
    return cls
