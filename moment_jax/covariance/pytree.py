"""Dataclasses of arrays as pytrees: checked when made by hand alone, fields formed when first read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

import jax
from jax import export
from jax.extend.core import get_opaque_trace_state

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def register_fields(cls: type[T]) -> type[T]:
    """Register a frozen dataclass, all fields arrays, as a pytree that is rebuilt without checks.

    `jax.tree_util.register_dataclass` would rebuild by the constructor, whose check of shapes stops
    transformations that have every right to other leaves: `jacfwd` and `hessian` put axes last,
    `vmap(out_axes=1)` in the middle, and factored optimisers summarise each array.

    Functions that take or give it can be saved with `jax.export`, if it is the library's own: a class of
    a user's may be defined anew under its name, as in a notebook.
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
    if cls.__module__.startswith("moment_jax."):
        export.register_pytree_node_serialization(
            cls,
            serialized_name=f"moment_jax.{cls.__name__}",
            serialize_auxdata=lambda _: b"",
            deserialize_auxdata=lambda _: None,
        )
    return cls


class FormedLater:
    """A dataclass of arrays, made of other arrays, whose fields are formed when they are first read.

    Gram matrices pass from one operation to the next as they are; a correlation is seldom read, and
    what nobody reads is not in the program. A boundary of a transformation reads all fields.
    """

    @classmethod
    def formed(cls, later: Mapping[str, Callable[[], Any]], **known: Any) -> Self:
        """An instance of fields and other attributes that are known, and fields that `later` forms."""
        result = object.__new__(cls)
        result.__dict__.update(known, _later=later, _trace=_trace())
        return result

    def __getattr__(self, name: str) -> Any:
        later = self.__dict__.get("_later", {})
        if name not in later:
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`.")
        value = later[name]()
        if (
            self.__dict__["_trace"] == _trace()
        ):  # what an inner trace forms is not for the outer one
            self.__dict__[name] = value
        return value

    def __getstate__(self) -> dict[str, Any]:
        fields: Any = self
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(fields)}

    @property
    def forms_later(self) -> bool:
        """Whether it is of this kind, and not made of its fields."""
        return "_later" in self.__dict__

    def known(self, name: str) -> Any:
        """An attribute that `formed` was given, or None."""
        return self.__dict__.get(name)


def _trace() -> object:
    return get_opaque_trace_state(convention="moment_jax")
