"""Primitives by kind, evaluated on certain arrays and on the places of random entries."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.propagation.arrays import Places

# fmt: off
ELEMENTWISE = {
    "abs", "add", "add_any", "and", "atan", "atan2", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf", "erf_inv",
    "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh",
}
UNMOVED = {
    "convert_element_type", "copy", "copy_p", "optimization_barrier", "reduce_precision",
    "sharding_constraint", "stop_gradient",
}
VIEWS = UNMOVED | {
    "broadcast_in_dim", "dynamic_slice", "expand_dims", "gather", "reshape", "rev", "slice",
    "split", "squeeze", "tile", "transpose",
}
# fmt: on


def _broadcast(x: np.ndarray, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    sizes = np.ones(len(shape), int)
    sizes[list(broadcast_dimensions)] = x.shape
    return np.broadcast_to(x.reshape(sizes), shape)


# On the host: JAX would compile a program for each operation and shape, which took most of the time.
_REARRANGED: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *x, dimension, **_: np.concatenate(x, dimension),
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "rev": lambda x, dimensions, **_: np.flip(x, dimensions),
    "slice": lambda x, start_indices, limit_indices, strides, **_: x[
        tuple(map(slice, start_indices, limit_indices, strides or (1,) * x.ndim))
    ],
    "split": lambda x, sizes, axis, **_: np.split(x, np.cumsum(sizes)[:-1], axis),
    "squeeze": lambda x, dimensions, **_: x.squeeze(tuple(dimensions)),
    "transpose": lambda x, permutation, **_: x.transpose(permutation),
}
_UFUNCS: dict[str, Callable[..., Any]] = {
    "add": np.add, "div": np.divide, "exp": np.exp, "log": np.log, "max": np.maximum,
    "mul": np.multiply, "neg": np.negative, "sqrt": np.sqrt, "square": np.square, "sub": np.subtract,
}  # fmt: skip
_COMPUTED: dict[str, Callable[..., Any]] = {
    **{name: lambda *x, of=of, **_: of(*x) for name, of in _UFUNCS.items()},
    "integer_pow": lambda x, y, **_: x**y,
    "reduce_max": lambda x, axes, **_: x.max(tuple(axes)),
    "reduce_sum": lambda x, axes, **_: x.sum(tuple(axes)),
    "rsqrt": lambda x, **_: 1 / np.sqrt(x),
    "stop_gradient": lambda x, **_: x,
}


def evaluate(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """Results of a primitive; computed immediately, even while tracing, if all operands are known.

    And on the host if they all are there, in precisions in which this makes no difference.
    """
    on_host = bool(operands) and all(isinstance(x, np.ndarray) for x in operands)
    precise = on_host and all(x.dtype.kind == "f" and x.dtype.itemsize > 2 for x in operands)
    of_numpy = _REARRANGED.get(primitive.name) if on_host else None
    of_numpy = _COMPUTED.get(primitive.name) if of_numpy is None and precise else of_numpy
    if of_numpy is not None:
        with np.errstate(all="ignore"):
            results = of_numpy(*operands, **params)
    elif all(map(is_known, operands)):
        with jax.ensure_compile_time_eval():
            results = primitive.bind(*operands, **primitive.get_bind_params(params))
    else:
        results = primitive.bind(*operands, **primitive.get_bind_params(params))
    results = list(results) if primitive.multiple_results else [results]
    kept = on_host and all(isinstance(r.dtype, np.dtype) for r in results)  # keys are JAX's
    return list(map(np.asarray, results)) if kept else results


def is_known(value: Any) -> bool:
    """Whether a value is a concrete array or number: no tracer, weight or node."""
    concrete = isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex)
    return concrete and not isinstance(value, jax.core.Tracer)


def is_view(operation: Any) -> bool:
    """Whether an equation or `Node` only rearranges its first operand."""
    if operation.primitive.name == "convert_element_type":
        return jnp.issubdtype(operation.params["new_dtype"], jnp.floating)
    return operation.primitive.name in VIEWS


def moved(operation: Any, places: Places, rest: Any) -> list[Places] | None:
    """Places of an array's entries in each result of an equation or `Node` that is a view of it.

    None if it is none, or if the other operands `rest`, such as indices, are not known.
    """
    if not is_view(operation) or not all(map(is_known, rest)):
        return None
    primitive, params = operation.primitive, operation.params
    if primitive.name in UNMOVED:
        return [places]
    if primitive.name == "gather" and "fill_value" in params:
        params = {**params, "fill_value": -1}
    results = evaluate(primitive, [places.astype(np.int32), *rest], params)
    return [np.asarray(r) for r in results]


def as_product(eqn: Any) -> Any:
    """A convolution of patches (kernel = stride, no padding) as a product of them, else None."""
    if eqn.primitive.name != "conv_general_dilated":
        return None
    p = eqn.params
    image, filters, out = p["dimension_numbers"]
    size = tuple(eqn.invars[1].aval.shape[i] for i in filters[2:])
    one = {*p["lhs_dilation"], *p["rhs_dilation"], p["feature_group_count"], p["batch_group_count"]}
    if size != tuple(p["window_strides"]) or any(map(any, p["padding"])) or one != {1}:
        return None

    def product(x: Array, kernel: Array) -> Array:
        x, kernel = x.transpose(image), kernel.transpose(filters)
        for axis, k in enumerate(size, 2):  # what fills no patch
            x = jax.lax.slice_in_dim(x, 0, x.shape[axis] // k * k, axis=axis)
        pairs = itertools.chain(*((n // k, k) for n, k in zip(x.shape[2:], size, strict=True)))
        over = [1, *range(3, 3 + 2 * len(size), 2)], [1, *range(2, 2 + len(size))]
        y = jax.lax.dot_general(x.reshape(*x.shape[:2], *pairs), kernel, (over, ([], [])))
        return y.transpose(np.argsort([out[0], *out[2:], out[1]]))

    return product


def uniform(array: Any) -> Any:
    """The number that fills a known array, or None."""
    if not is_known(array):
        return None
    flat = np.asarray(array).reshape(-1)
    same = (flat == flat[:1]) | ((flat != flat) & (flat[:1] != flat[:1]))  # all NaN too
    return flat[0] if flat.size and same.all() else None
