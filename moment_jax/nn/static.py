"""Static values of compiled programs: what tells two of them apart, whatever the values hold."""

import dataclasses
import functools
import io
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import linen

from moment_jax.covariance.fields import known_values


class Static:
    """A value that JAX and Flax can hash: a module with its configuration, a graph, keyword arguments.

    Two are equal if their values, which are not to be changed, have the same types and contents, so that
    1, 1.0 and True have programs of their own. Arrays count by their numbers, and what has neither
    contents to compare nor a hash, such as a configuration object of another library, by identity.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = _key(value)
        self.hash = hash(self.key)  # of large graphs it is asked for at every call

    def __reduce__(self) -> Any:
        """For pickle, which cannot find functions that JAX wrapped, such as nnx.relu, by itself."""
        file = io.BytesIO()
        try:
            _Pickler(file).dump(self.value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise pickle.PicklingError(
                "A pickled model needs classes and functions that stand in a module. Got one that does "
                f"not: {error}. Move it there, or save nnx.state(model) and build the model again."
            ) from error
        return _unpickled, (file.getvalue(),)

    def __deepcopy__(self, memo: Any) -> "Static":
        return self

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Static) and (self.hash, self.key) == (other.hash, other.key)
        )


def _unpickled(data: bytes) -> Static:
    return Static(pickle.loads(data))


class _Pickler(pickle.Pickler):
    """Stores what stands in a module under its name, whatever its type."""

    def reducer_override(self, x: Any) -> Any:
        name, module = getattr(x, "__qualname__", None), getattr(x, "__module__", None)
        if isinstance(x, type) or not (isinstance(name, str) and isinstance(module, str)):
            return NotImplemented
        found = functools.reduce(
            lambda place, part: getattr(place, part, None), name.split("."), sys.modules.get(module)
        )
        return name if found is x else NotImplemented


class _Itself:
    """An object by its identity. It is kept, so that no other one comes to its place in memory."""

    def __init__(self, kept: object) -> None:
        self.kept = kept

    def __hash__(self) -> int:
        return id(self.kept)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.kept is other.kept


def _key(x: Any) -> Any:
    kind = type(x)
    if isinstance(x, bool | int | float | complex | str | None):
        return kind, repr(x)  # -0.0 and NaN too
    if isinstance(x, jax.Array | np.ndarray) and not jax.dtypes.issubdtype(
        x.dtype, jax.dtypes.prng_key
    ):
        known = known_values(x)
        return _Itself(x) if known is None else (kind, x.shape, str(x.dtype), known.tobytes())
    if isinstance(x, Mapping):
        return kind, *((_key(k), _key(v)) for k, v in x.items())
    if isinstance(x, list | tuple):
        return kind, *map(_key, x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        # A linen module's parent is what it was bound in, which is no part of it.
        own = (f.name for f in dataclasses.fields(x))
        own = (name for name in own if not (isinstance(x, linen.Module) and name == "parent"))
        return kind, *((name, _key(getattr(x, name, None))) for name in own)
    try:
        hash(x)
    except TypeError:
        return _Itself(x)
    return kind, x
