"""Parts of the graph: what lies between two arrays, as a plain function."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.posterior import Point
from moment_jax.propagation import arrays, primitives
from moment_jax.propagation.arrays import Places
from moment_jax.propagation.graph import Node, between
from moment_jax.propagation.weights import Weight
from moment_jax.xla import inlined

REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax"}
BY_ROW = primitives.ELEMENTWISE | REDUCTIONS | primitives.VIEWS
# What is recognised by its values may consist of the operations that it needs, and of no others: a clip
# beyond the values that are tried would be dropped.
LINEAR = primitives.VIEWS | {
    "add", "add_any", "div", "integer_pow", "mul", "neg", "reduce_sum", "square", "sub",
}  # fmt: skip
NORM = LINEAR | {"pow", "rsqrt", "sqrt"}
SOFTMAX = LINEAR | {"exp", "log", "reduce_max"}
_GUARDS = {"abs", "eq", "is_finite", "max", "ne", "select_n", "sign"}  # of sums and maxima of a row


def weights_of(
    root: Node, starts: Iterable[Any], operands: Callable[[Node], list[Node]] = lambda n: n.origins
) -> list[Weight]:
    """The weights that an array depends on other than through `starts`, but for operands taken apart."""
    nodes = sorted(between(root, starts, operands), key=lambda n: n.index)
    weights = (x for n in nodes for x in n.counted if isinstance(x, Weight))
    return list(dict.fromkeys(x for x in weights if not isinstance(x.posterior, Point)))


def sources(node: Node, expandable: Callable[[Node], bool]) -> Iterator[Node]:
    """Arrays of which `node` is a function, without weights, of expandable nodes; nearest first."""
    frontier = {node}
    while not any(isinstance(x, Weight) for x in node.operands) and expandable(node):
        frontier.remove(node)
        frontier.update(node.origins)
        if len(frontier) == 1:
            yield next(iter(frontier))
        if not frontier:
            return
        node = max(frontier, key=lambda n: n.index)


def reads(output: Node) -> np.ndarray | None:
    """How much of each entry of the last attention, or loop, the sum of an output's entries reads.

    Only tokens are told apart: factors count as ones unless they are known and multiply entry by entry,
    elementwise functions as the identity. None if there is no product of two random arrays.
    """
    found: dict[Node, np.ndarray] = {output: np.broadcast_to(1.0, output.shape)}
    while found:
        node = max(found, key=lambda n: n.index)
        if node.op == "loop" or (node.op == "dot_general" and len(node.nodes) == 2):
            return found[node]
        read = found.pop(node)
        for i, x in enumerate(node.operands):
            if isinstance(x, Node):
                own = _read_of(node, i, read)
                found[x] = found[x] + own if x in found else own
    return None


def _read_of(node: Node, i: int, read: np.ndarray) -> np.ndarray:
    """How much of its operand i a node reads, of which itself this much is read."""
    x: Any = node.operands[i]
    known: list[Any] = [np.asarray(y) if primitives.is_known(y) else None for y in node.operands]
    seen = primitives.moved(node, arrays.numbered(x.shape), node.operands[1:])
    if seen is not None:
        places = seen[node.output].ravel()
        kept = np.where(places < 0, 0, read.ravel())
        return np.bincount(np.maximum(places, 0), kept, x.size).reshape(x.shape)
    if node.op in REDUCTIONS:
        read = np.expand_dims(read, tuple(node.params["axes"]))
    elif node.op == "dot_general":
        own, other = arrays.factors(node)[i], arrays.factors(node)[1 - i]
        free = tuple(x.ndim + k for k in other.free)
        names = [*own.batch, *(own.free + free if i == 0 else free + own.free)]
        left = [k for k in range(x.ndim) if k not in own.contracted]
        read = np.expand_dims(np.einsum(read, names, left), own.contracted)
    elif node.op == "concatenate":
        axis = node.params["dimension"]
        start = sum(y.shape[axis] for y in node.operands[:i])
        read = read.take(range(start, start + x.shape[axis]), axis)
    elif node.op == "mul" and known[1 - i] is not None:
        read = read * np.abs(known[1 - i])
    elif node.op == "select_n" and known[0] is not None:
        read = np.where(known[0] == i - 1, read, 0)
    if read.ndim == x.ndim and read.shape != x.shape:
        read = read.sum(tuple(k for k, n in enumerate(x.shape) if n == 1), keepdims=True)
    pairs = zip(read.shape, x.shape, strict=False)
    fits = read.ndim == x.ndim and all(n in (1, size) for n, size in pairs)
    return np.broadcast_to(read if fits else read.mean(), x.shape)


def compute(
    roots: Iterable[Node], known: dict[Any, Any], replace: Callable[[Any], Any] = lambda x: x,
    dtype_of: Callable[[Any], Any] = lambda dtype: dtype,
) -> list[Any]:  # fmt: skip
    """Values of the roots, given those of some nodes, and of weights by their posterior.

    Other weights have their mean. `replace` maps the certain operands, and `dtype_of` the precisions.
    """
    values = dict(known)

    def value(x: Any) -> Any:
        if isinstance(x, Weight):
            return known.get(arrays.Same(x.posterior), x.posterior.mean).reshape(-1)[x.places]
        if not isinstance(x, Node):
            return replace(x)
        if x not in values:
            operands = [value(y) for y in x.operands]
            own = {"new_dtype": dtype_of(x.params["new_dtype"])} if "new_dtype" in x.params else {}
            params, belief = {**x.params, **own}, x.op == "belief"
            found = operands if belief else primitives.evaluate(x.primitive, operands, params)
            values[x] = found[x.output].astype(dtype_of(x.dtype))
        return values[x]

    return [value(x) for x in roots]


def precise(dtype: Any) -> Any:
    """float32 for a lower precision, in which other functions look alike."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def probe(node: Node, source: Node, x: Any) -> Any:
    """Value of a node at a known value of its source, computed precisely; known if all else is."""

    def on_host(constant: Any) -> Any:
        if not primitives.is_known(constant):
            return constant
        constant = np.asarray(jnp.asarray(constant))
        return constant.astype(precise(constant.dtype))

    with jax.ensure_compile_time_eval():
        value = np.asarray(x).astype(precise(source.dtype)).reshape(source.shape)
        (found,) = compute([node], {source: value}, on_host, precise)
        return np.asarray(found, float) if primitives.is_known(found) else found


def misfit(node: Node, source: Node, operations: set[str]) -> Node | None:
    """An operation between the two that is none of these, a mask, or a guard; or None.

    A guard acts on sums and maxima of a row alone, to keep them finite or positive.
    """
    reduced: set[Node] = set()
    for n in sorted(between(node, [source]), key=lambda n: n.index):
        if n.op in REDUCTIONS or all(x in reduced for x in n.nodes):
            reduced.add(n)
        mask = n.op == "select_n" and not isinstance(n.operands[0], Node)
        cut = n.op == "convert_element_type" and not primitives.is_view(n)  # to integers
        guard = n.op in _GUARDS and n in reduced
        if not ((n.op in operations and not cut) or mask or guard):
            return n
    return None


class Univariate(NamedTuple):
    """An elementwise image of an array."""

    source: Node
    fn: Callable[[Array], Array]  # of a number
    operations: set[str]


def univariate(node: Node) -> Univariate | None:
    """The array and the scalar function of which `node` is the elementwise image, or None."""

    def expandable(n: Node) -> bool:
        same = all(x.shape == node.shape for x in n.nodes)
        total = n.op == "log" and n.nodes[0].op == "reduce_sum"  # by hand a logsumexp
        return n.op in primitives.ELEMENTWISE and same and all_uniform(n) and not total

    found = [x for x in sources(node, expandable) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not found:
        return None
    source = found[-1]
    inside = between(node, [source])

    def number(constant: Any) -> Array:
        return jnp.asarray(np.asarray(constant).reshape(-1)[0])

    @inlined
    def fn(x: Array) -> Array:
        return compute([node], {source: x.astype(source.dtype)}, number)[0].astype(x.dtype)

    return Univariate(source, fn, {n.op for n in inside})


def all_uniform(node: Node) -> bool:
    """Whether each certain operand holds one number."""
    return all(isinstance(x, Node) or primitives.uniform(x) is not None for x in node.operands)


def viewed(value: Any) -> tuple[Any, Places]:
    """What an array is a view of, itself if it is none, and the place there of each of its entries."""
    places = arrays.numbered(np.shape(value))
    while isinstance(value, Node) and primitives.is_view(value):
        inner, *rest = value.operands
        moved = primitives.moved(value, arrays.numbered(np.shape(inner)), rest)
        if moved is None:
            break
        value, places = inner, np.append(moved[value.output], -1)[places]
    return value, places


def through_views(value: Any, find: Callable[[Node], Any]) -> Any:
    """The same view of what `find` makes of the array of which this is one; None if it makes none."""
    inner, places = viewed(value)
    if not isinstance(inner, Node) or primitives.is_view(inner):
        return None
    found = find(inner)
    if found is None:
        return None
    return dataclasses.replace(found, places=np.append(found.places, -1)[places])
