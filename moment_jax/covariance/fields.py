"""Pytree dataclasses of arrays, with checked constructors."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Shape = tuple[int, ...]
NUMBERS = (jax.Array, np.ndarray, np.generic, int, float)


def register_fields(cls: type[T]) -> type[T]:
    """Register a frozen dataclass whose fields are arrays as a pytree that is rebuilt without checks.

    `jax.tree_util.register_dataclass` would call the constructor, whose shape checks fail in legitimate
    transformations: `jacfwd` and `hessian` append axes, `vmap(out_axes=1)` inserts one, and factored
    optimisers summarise each array. Its repr shows shapes alone.
    """
    shown: Any = cls
    shown.__repr__, shown.__getattr__ = by_shapes, no_such
    keys = [jax.tree_util.GetAttrKey(field.name) for field in dataclasses.fields(cls)]

    def flatten(instance: T) -> tuple[list[tuple[object, object]], None]:
        return [(key, getattr(instance, key.name)) for key in keys], None

    jax.tree_util.register_pytree_with_keys(cls, flatten, lambda _, leaves: rebuilt(cls, leaves))
    return cls


def by_shapes(x: Any) -> str:
    """`Name(field=float32[5,2], ...)` of a dataclass or a named tuple, arrays by type and shape."""
    if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    if dataclasses.is_dataclass(x):
        fields: Any = [field.name for field in dataclasses.fields(x)]
    elif not (fields := getattr(x, "_fields", ())):
        return repr(x)
    parts = ", ".join(f"{name}={by_shapes(getattr(x, name))}" for name in fields)
    return f"{type(x).__name__}({parts})"


def no_such(x: Any, name: str) -> Any:
    """For a wrong name, an AttributeError that lists the right ones."""
    known = {*dir(type(x)), *getattr(type(x), "__dataclass_fields__", ())}
    names = "" if name.startswith("_") else ", ".join(sorted(n for n in known if n[0] != "_"))
    raise AttributeError(f"`{type(x).__name__}` has no {name}. It has {names}.", name=name, obj=x)


def rebuilt(cls: Any, leaves: Iterable[object]) -> Any:
    """An instance of these fields, without the constructor's checks."""
    instance = object.__new__(cls)
    for field, leaf in zip(dataclasses.fields(cls), leaves, strict=True):
        object.__setattr__(instance, field.name, leaf)  # the dataclass is frozen
    return instance


def need(
    call: str, right: Any, rule: str, came: object, mend: str = "", error: type = ValueError
) -> None:
    """Raise, with the rule, what came and the mend, unless it is right."""
    if not right:
        raise error(f"`{call}` needs {rule}. Got {came}.{' ' * bool(mend)}{mend}")


def check_fields(
    call: str, fix: str, other_shapes: Callable[[Shape], list[Shape]], *leaves: Any
) -> None:
    """Raise unless the fields of a dataclass are real arrays whose shapes fit the first field.

    Anything else in place of arrays (None, axis numbers for `vmap`) passes, and so do leading axes that
    all fields share, as in a stack. `call` is the constructor call, `fix` the advice; `other_shapes`
    maps the first field's shape to the others', and raises a ValueError if it is invalid.
    """
    for leaf in leaves:
        check_floating(call, leaf)
    if not all(isinstance(x, NUMBERS) and not isinstance(x, bool) for x in leaves):
        return
    first, *others = known = [np.shape(leaf) for leaf in leaves]
    if not any(known):
        return
    try:
        expected = other_shapes(first)
    except ValueError as error:
        raise ValueError(f"`{call}` {error} Got {_listed(known)}. {fix}") from None
    rule = f"fields of shapes {_listed([first, *expected])}, by the first field"
    need(call, others == expected, rule, _listed(known), fix)


def check_array(call: str, array: object) -> None:
    """Raise unless this is a floating-point array."""
    came, mend = type(array).__name__, "Use jnp.asarray(values)."
    need(call, hasattr(array, "ndim"), "arrays", came, mend, TypeError)
    check_floating(call, array)


def check_floating(call: str, array: object) -> None:
    """Raise for lists and for arrays of integers or booleans."""
    if isinstance(array, list):
        check_array(call, array)
    if isinstance(array, (jax.Array, np.ndarray)):
        right, mend = jnp.issubdtype(array.dtype, jnp.floating), "Use .astype(jnp.float32)."
        need(call, right, "floating-point numbers", array.dtype, mend, TypeError)


def check_dense(dense: jax.Array) -> None:
    """Raise unless `dense` has the shape (T, D, T, D)."""
    right = dense.ndim == 4 and dense.shape[:2] == dense.shape[2:]
    mend = "For the covariance of the flattened array, use cov.reshape(T, D, T, D)."
    need("project", right, "a dense covariance of shape (T, D, T, D)", dense.shape, mend)


def check_variances(call: str, array: Any, axes: str = "") -> None:
    """Raise if variances are known and negative beyond rounding.

    With `axes`, such as "ij" for (..., n, n) matrices, the variances are the diagonal of these axes.
    """
    values = known_values(array)
    if values is None or values.ndim < 2 * len(axes) or values.size == 0:
        return
    if axes:
        values = np.einsum(f"...{axes}{axes}->...{axes}", values)
    least, largest = float(np.min(values)), float(np.max(np.abs(values)))
    # Plain integers, such as axes for `vmap`, have no rounding error.
    eps = float(jnp.finfo(values.dtype).eps) if jnp.issubdtype(values.dtype, jnp.floating) else 0.0
    right, mend = not least < -(eps**0.5) * largest, "For standard deviations, pass their squares."
    need(call, right, "variances that are not negative", f"{least:.4g}", mend)


def known_values(array: object) -> np.ndarray | None:
    """The array as NumPy; None while tracing, for arrays on other hosts and for other types."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, NUMBERS):
        return None
    known = not isinstance(array, jax.Array) or array.is_fully_addressable
    return np.asarray(array) if known else None


def sequence_shape(structure: type, shape: Shape) -> tuple[int, int]:
    """Return `shape` if it is that of one sequence, (T, D); raise otherwise."""
    call = f"{structure.__name__}.zeros"
    mend = f"For a batch, use jax.vmap, and {call}(x.shape) inside the mapped function."
    need(f"{call}(shape)", len(shape) == 2, "the shape (T, D) of one sequence", tuple(shape), mend)
    return shape[0], shape[1]


def _listed(shapes: list[Shape]) -> str:
    return " and ".join(map(str, shapes))
