"""Evaluates primitives on certain arrays, and on the places of random entries."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# fmt: off
UNMOVED = {
    "convert_element_type", "copy", "copy_p", "optimization_barrier", "reduce_precision",
    "sharding_constraint", "stop_gradient",
}
VIEWS = UNMOVED | {
    "broadcast_in_dim", "dynamic_slice", "expand_dims", "gather", "reshape", "rev", "slice",
    "split", "squeeze", "tile", "transpose",
}
# fmt: on


def evaluate(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """Results of a primitive; computed immediately, even while tracing, if all operands are known."""
    bound = primitive.get_bind_params(params)
    if all(map(is_known, operands)):
        with jax.ensure_compile_time_eval():
            results = primitive.bind(*operands, **bound)
    else:
        results = primitive.bind(*operands, **bound)
    return list(results) if primitive.multiple_results else [results]


def is_known(value: Any) -> bool:
    """Whether a value is a concrete array or number: no tracer, weight or node."""
    concrete = isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex)
    return concrete and not isinstance(value, jax.core.Tracer)


def is_view(operation: Any) -> bool:
    """Whether an equation or `Node` only rearranges its first operand."""
    if operation.primitive.name == "convert_element_type":
        return jnp.issubdtype(operation.params["new_dtype"], jnp.floating)
    return operation.primitive.name in VIEWS


def moved(operation: Any, places: np.ndarray, rest: Any) -> list[np.ndarray] | None:
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


def as_patches(eqn: Any) -> Callable[..., Any] | None:
    """A convolution, or a sum over windows, of patches (kernel = stride, no padding), else None.

    As a reshape and a product or sum.
    """
    p, name = eqn.params, eqn.primitive.name
    if name not in ("conv_general_dilated", "reduce_window_sum"):
        return None
    convolution = name == "conv_general_dilated"
    steps = p["window_strides"]
    if convolution:
        image, filters, out = p["dimension_numbers"]
        size = tuple(eqn.invars[1].aval.shape[i] for i in filters[2:])
        ones = (*p["lhs_dilation"], *p["rhs_dilation"])
        ones += p["feature_group_count"], p["batch_group_count"]
    else:
        size, ones = p["window_dimensions"], (*p["base_dilation"], *p["window_dilation"])
    if size != tuple(steps) or any(itertools.chain(*p["padding"])) or set(ones) - {1}:
        return None
    space, d = 2 if convolution else 0, len(size)

    def split(x: Any) -> Any:
        """Each axis of the windows as (number of windows, window)."""
        counts = [n // k for n, k in zip(x.shape[space:], size, strict=True)]
        for axis, (n, k) in enumerate(zip(counts, size, strict=True), space):
            x = jax.lax.slice_in_dim(x, 0, n * k, axis=axis)
        pairs = itertools.chain(*zip(counts, size, strict=True))
        return x.reshape(*x.shape[:space], *pairs)

    def total(x: Any) -> Any:
        return split(x).sum(tuple(range(1, 2 * d, 2)))

    def product(x: Any, kernel: Any) -> Any:
        windows, kernel = split(x.transpose(image)), kernel.transpose(filters)
        contracted = (*range(3, 3 + 2 * d, 2), 1), (*range(2, 2 + d), 1)
        y = jax.lax.dot_general(windows, kernel, (contracted, ((), ())))
        return y.transpose(np.argsort([out[0], *out[2:], out[1]]))

    return product if convolution else total


def uniform(array: Any) -> Any:
    """The number that fills a known array, or None."""
    if not is_known(array):
        return None
    flat = np.asarray(array).reshape(-1)
    same = (flat == flat[:1]) | ((flat != flat) & (flat[:1] != flat[:1]))  # all NaN too
    return flat[0] if flat.size and same.all() else None


class Factor(NamedTuple):
    """The axes of one factor of a product (`dot_general`)."""

    batch: tuple[int, ...]
    free: tuple[int, ...]
    contracted: tuple[int, ...]


def factors(node: Any) -> tuple[Factor, Factor]:
    """The axes of a product's two factors; the result has the batch axes, then the free ones."""
    contracted, batch = node.params["dimension_numbers"]
    left, right = (
        Factor(tuple(b), tuple(i for i in range(np.ndim(x)) if i not in (*c, *b)), tuple(c))
        for x, c, b in zip(node.operands, contracted, batch, strict=True)
    )
    return left, right


def in_product(node: Any, side: int, entries: np.ndarray) -> np.ndarray:
    """An array of the product's entries, which has the free axes of `side` before those of the other.

    The entries come in any shape whose C order is that of batch, own free and other free axes.
    """
    own, other = factors(node)[side], factors(node)[1 - side]
    shape = [np.shape(node.operands[side])[i] for i in (*own.batch, *own.free)]
    shape += [np.shape(node.operands[1 - side])[i] for i in other.free]
    entries = entries.reshape(shape)
    if side == 1:
        start, count = len(own.batch), len(own.free)
        entries = np.moveaxis(entries, range(start, start + count), range(-count, 0))
    return entries
