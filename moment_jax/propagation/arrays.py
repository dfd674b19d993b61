"""Random arrays: moments of a (T, D) sequence, and the place of each array entry in it.

And primitives, evaluated on certain arrays and on the places of random entries.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.base import Cross

Axes = tuple[int, ...]
Places = np.ndarray
"""Integers of any shape: where each entry lies in another array, flattened; -1 for a certain zero."""
InSequence = Places  # of a random array, in its sequence (T, D)
InLayer = Places  # of a view, in the output (T, O) of a dense layer
InHeads = Places  # of attention's output, in the heads side by side (T, H K)
InScores = Places  # of attention weights, in the product that has their scores
InWeights = Places  # of a table (H, T, S), in the array of attention weights
InBelief = Places  # of an array of weights, in a belief


class Same:
    """An array as a key: equal to itself alone, and kept, so that nothing else takes its place."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.array is other.array


class View:
    """An array of any shape whose entries lie at flat places of something else."""

    places: Places

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.places.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.places.ndim

    def broadcast(self, shape: tuple[int, ...]) -> Self:
        """The array broadcast to a shape."""
        own: Any = self
        if self.shape == tuple(shape):
            return own
        return dataclasses.replace(own, places=np.broadcast_to(self.places, shape))


Carry = Callable[[Any], Any]  # Cov[u, input] -> Cov[u, output] for any u; None is zero
Compute = Callable[[], tuple[Any, ...]]  # -> mean (T, D), cov, and a `Carry` for each parent
_count = itertools.count()


def as_it_is(cross: Any) -> Any:
    """The `Carry` of what keeps its covariances."""
    return cross


@dataclasses.dataclass(eq=False)
class Base:
    """A random sequence (T, D): planned by its shape, computed when its numbers are asked for."""

    shape: tuple[int, ...]
    compute: Compute
    parents: tuple[Sequence, ...] | None = ()  # None if it is unknown how it depends on them
    node: Any = None  # of the graph, whose moments these are first
    finish: Callable[[Any], Any] = as_it_is  # its covariance at landmarks, and pooled
    index: int = dataclasses.field(default_factory=lambda: next(_count))

    @functools.cached_property
    def numbers(self) -> tuple[Array, Any, list[Carry]]:
        """Mean, covariance, and how it carries covariances with each parent."""
        mean, cov, *carries = self.compute()
        return mean, self.finish(cov), carries

    @functools.cached_property
    def dtype(self) -> Any:
        """Of its numbers, without computing them."""
        kinds = [x.base.dtype for x in self.parents or ()]
        return jnp.result_type(*kinds) if kinds else self.compute()[0].dtype

    def at(self, order: Places, tokens: Axes = (), features: Axes = ()) -> Sequence:
        """The sequence of its entries at these places, (T, D)."""
        return Sequence(self, order, tokens, features)


@dataclasses.dataclass(frozen=True, eq=False)
class Moments(View):
    """A random sequence (T, D) viewed as an array of any shape.

    Reshapes, transposes, slices and repeats only change `places`; moments are recomputed when the array
    is used as a sequence with other tokens or features.
    """

    base: Base
    places: InSequence
    known: dict[Any, Sequence] = dataclasses.field(default_factory=dict, init=False)

    def array(self) -> Array:
        """Mean of the array."""
        return take(self.base.numbers[0], self.places)

    def variance(self) -> Array:
        """Variances of the array."""
        return take(self.base.numbers[1].variance(), self.places)

    def axes(self) -> tuple[Axes, Axes]:
        """The array's token axes and feature axes; an axis along which both change is a feature axis."""
        by_token, by_feature = (
            [i for i in range(self.ndim) if (x.take(range(min(1, x.shape[i])), i) != x).any()]
            for x in np.divmod(self.places, self.base.shape[1])
        )
        return tuple(i for i in by_token if i not in by_feature), tuple(by_feature)

    def natural(self) -> tuple[Axes, Axes]:
        """Token axes and feature axes, which together hold every axis longer than one."""
        tokens, features = self.axes()
        long = [i for i, n in enumerate(self.shape) if n > 1]
        features = features or tuple(i for i in long if i not in tokens)
        return tuple(sorted({*tokens, *long} - {*features})), features

    def sequence(self, tokens: Axes | None = None, features: Axes = ()) -> Sequence:
        """The array as a sequence with these axes, in order; by default the natural ones."""
        if tokens is None:
            tokens, features = self.natural()
        if (tokens, features) not in self.known:
            order = as_rows(self.places, tokens, features)
            self.known[tokens, features] = self.base.at(order, tokens, features)
        return self.known[tokens, features]


@dataclasses.dataclass(frozen=True, eq=False)
class Sequence:
    """A random array as tokens by features, and the axes along which these lie."""

    base: Base
    order: InSequence  # of its entries in the base, (T, D)
    tokens: Axes = ()
    features: Axes = ()

    @functools.cached_property
    def moments(self) -> tuple[Array, Any]:
        """Mean (T, D) and covariance, computed."""
        mean, cov, _ = self.base.numbers
        if in_order(self.order, self.base.shape):
            return mean, cov
        return take(mean, self.order), take_cov(cov, self.order)

    @property
    def mean(self) -> Array:
        """(T, D)."""
        return self.moments[0]

    @property
    def cov(self) -> Any:
        """A covariance of the same shape."""
        return self.moments[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """(T, D)."""
        return self.order.shape

    @property
    def dtype(self) -> Any:
        """Of its numbers."""
        return self.base.dtype

    @property
    def axes(self) -> tuple[Axes, Axes]:
        """The token axes and the feature axes."""
        return self.tokens, self.features

    def same(self, other: Sequence) -> bool:
        """Whether both are one array."""
        return self.base is other.base and np.array_equal(self.order, other.order)

    def made(self, compute: Compute, shape: Any, width: int | None = None) -> Moments:
        """An array of this shape, with the same axes, made of this one alone."""
        t, d = self.shape
        base = Base((t, width or d), compute, (self,))
        return Moments(base, ordered(shape, *self.axes))

    def arranged(self, cross: Any) -> Any:
        """Cov[u, this sequence], given Cov[u, base]; None where the structure cannot hold it."""
        if in_order(self.order, self.base.shape):
            return cross
        rows, columns = table(self.order, self.base.shape[1])
        if rows is not None:
            return cross.take(rows, columns)
        return cross.entries(self.order) if isinstance(cross, Cross) else None


def made(compute: Compute, shape: Any, places: Places, *parents: Sequence) -> Moments:
    """A random array whose entries lie at these places of a new sequence, made of these."""
    return Moments(Base(tuple(shape), compute, parents), places)


def ordered(shape: tuple[int, ...], tokens: Axes, features: Axes) -> Places:
    """Places of an array's entries in a sequence with these axes."""
    rest = tuple(i for i in range(len(shape)) if i not in (*tokens, *features))
    order = (*rest, *tokens, *features)
    return numbered([shape[i] for i in order]).transpose(np.argsort(order))


def numbered(shape: Any) -> Places:
    """The places of an array's own entries."""
    return np.arange(math.prod(shape)).reshape(shape)


def in_order(places: Places, shape: Any) -> bool:
    """Whether these are the places of an array's own entries."""
    return places.shape == tuple(shape) and np.array_equal(places, numbered(shape))


def by_last_axis(ndim: int) -> tuple[Axes, Axes]:
    """Token and feature axes, with the last one for features."""
    axes = tuple(range(ndim))
    return axes[:-1], axes[-1:]


def as_rows(array: Any, *groups: Axes) -> Any:
    """An array with each group of axes merged into one, such as tokens and features into (T, D).

    All remaining axes must have length one.
    """
    named = [i for axes in groups for i in axes]
    rest = (i for i in range(array.ndim) if i not in named)
    size = [math.prod(array.shape[i] for i in axes) for axes in groups]
    return array.transpose(*rest, *named).reshape(size)


def take(array: Any, places: Places) -> Any:
    """Entries at these places."""
    if np.array_equal(places.ravel(), np.arange(array.size)):
        return array.reshape(places.shape)
    values = array.reshape(-1)[np.maximum(places, 0)]
    xp: Any = np if isinstance(array, np.ndarray) else jnp  # known while tracing
    return xp.where(places < 0, 0, values) if (places < 0).any() else values


def table(places: Places, width: int) -> tuple[Any, Any]:
    """The rows and columns of (T, width) of which places (U, O) are a table; None if they are none."""
    rows = np.where(places < 0, -1, places // width).max(axis=1)
    columns = np.where(places < 0, -1, places % width).max(axis=0)
    known = (rows >= 0)[:, None] & (columns >= 0)
    whole = np.where(known, rows[:, None] * width + columns, -1)
    return (rows, columns) if np.array_equal(places, whole) else (None, None)


def take_cov(cov: Any, places: Places) -> Any:
    """Covariance of the sequence made of the entries at these places of another."""
    num_tokens, num_features = cov.shape
    rows, columns = table(places, num_features)
    if rows is None:
        return cov.entries(places)
    if not np.array_equal(rows, np.arange(num_tokens)):
        cov = cov.map_tokens(jax.nn.one_hot(rows, num_tokens, dtype=cov.dtype))
    if not np.array_equal(columns, np.arange(num_features)):
        cov = cov.map_features(jax.nn.one_hot(columns, num_features, dtype=cov.dtype).T)
    return cov


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
_COMPUTED: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, **_: x + y,
    "div": lambda x, y, **_: x / y,
    "exp": lambda x, **_: np.exp(x),
    "integer_pow": lambda x, y, **_: x**y,
    "log": lambda x, **_: np.log(x),
    "max": lambda x, y, **_: np.maximum(x, y),
    "mul": lambda x, y, **_: x * y,
    "neg": lambda x, **_: -x,
    "reduce_max": lambda x, axes, **_: x.max(tuple(axes)),
    "reduce_sum": lambda x, axes, **_: x.sum(tuple(axes)),
    "rsqrt": lambda x, **_: 1 / np.sqrt(x),
    "sqrt": lambda x, **_: np.sqrt(x),
    "square": lambda x, **_: x * x,
    "stop_gradient": lambda x, **_: x,
    "sub": lambda x, y, **_: x - y,
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
    ones = {
        *p["lhs_dilation"],
        *p["rhs_dilation"],
        p["feature_group_count"],
        p["batch_group_count"],
    }
    if size != tuple(p["window_strides"]) or any(map(any, p["padding"])) or ones != {1}:
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


class Factor(NamedTuple):
    """The axes of one factor of a product (`dot_general`)."""

    batch: Axes
    free: Axes
    contracted: Axes


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
