"""Evaluates primitives on certain arrays, and on the places of random entries."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

UNMOVED = {
    "convert_element_type",
    "copy",
    "copy_p",
    "optimization_barrier",
    "reduce_precision",
    "sharding_constraint",
    "stop_gradient",
}
VIEWS = UNMOVED | {
    "broadcast_in_dim",
    "dynamic_slice",
    "expand_dims",
    "gather",
    "reshape",
    "rev",
    "slice",
    "split",
    "squeeze",
    "tile",
    "transpose",
}


def evaluate(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """Results of a primitive; computed immediately, even while tracing, if all operands are known."""
    bound = primitive.get_bind_params(params)
    if all(map(is_known, operands)):
        with jax.ensure_compile_time_eval():
            results = primitive.bind(*operands, **bound)
    else:
        results = primitive.bind(*operands, **bound)
    return list(results) if primitive.multiple_results else [results]


def is_view(operation: Any) -> bool:
    """Whether an equation or `Node` only rearranges its first operand."""
    if operation.primitive.name == "convert_element_type":
        return jnp.issubdtype(operation.params["new_dtype"], jnp.floating)
    return operation.primitive.name in VIEWS


def is_known(value: Any) -> bool:
    """Whether an array is concrete (no tracer)."""
    return not isinstance(value, jax.core.Tracer)


def moved(
    primitive: Any, places: np.ndarray, rest: list[Any], params: dict[str, Any]
) -> list[np.ndarray]:
    """The places of an array's entries after an operation that only rearranges them."""
    if primitive.name in UNMOVED:
        return [places]
    if primitive.name == "gather" and "fill_value" in params:
        params = {**params, "fill_value": -1}
    results = evaluate(primitive, [places.astype(np.int32), *rest], params)
    return [np.asarray(r) for r in results]


def uniform(array: Any) -> Any:
    """The number that fills a known array, or None."""
    if not hasattr(array, "__array__") and not np.isscalar(array):
        return None  # a weight or a node
    if not is_known(array):
        return None
    flat = np.asarray(array).reshape(-1)
    return flat[0] if flat.size and (flat == flat[0]).all() else None
