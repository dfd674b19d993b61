"""Parts of the graph: what lies between two arrays, as a plain function."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.posterior import Point
from moment_jax.propagation.graph import Node
from moment_jax.propagation.primitives import VIEWS, evaluate, factors, is_known, moved, uniform
from moment_jax.propagation.weights import Weight, overlap

# fmt: off
ELEMENTWISE = {
    "abs", "add", "add_any", "and", "atan", "atan2", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf", "erf_inv",
    "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh",
}
# fmt: on
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax"}
BY_ROW = ELEMENTWISE | REDUCTIONS | VIEWS


def weights_of(
    root: Node, source: Node | None, operands: Callable[[Node], list[Node]] = lambda n: n.origins
) -> list[Weight]:
    """The weights that an array depends on other than through `source`, or a decoder's memory."""
    nodes = sorted(between(root, source, operands), key=lambda n: n.index)
    weights = (x for n in nodes for x in n.operands if isinstance(x, Weight))
    return list(dict.fromkeys(x for x in weights if not isinstance(x.posterior, Point)))


def fork(nodes: list[Node]) -> Node | None:
    """The nearest array that nodes have in common, if no weight is in two of it and what follows."""
    for source in dominators(nodes):
        if jnp.issubdtype(source.dtype, jnp.floating):
            parts = [source.weights, *(weights_of(node, source) for node in nodes)]
            pairs = itertools.combinations(parts, 2)
            return None if any(overlap(a, b) for a, b in pairs) else source
    return None


def between(
    root: Node, source: Node | None, operands: Callable[[Node], list[Node]] = lambda n: n.nodes
) -> set[Node]:
    """The nodes that an array depends on, down to but without the source."""
    seen: set[Node] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node is source or node in seen:
            continue
        seen.add(node)
        stack.extend(operands(node))
    return seen


def dominators(
    roots: Iterable[Node], expandable: Callable[[Node], bool] = lambda n: True
) -> Iterator[Node]:
    """Nodes through which every random path to the roots passes, nearest first."""
    frontier = set(roots)
    while frontier:
        if len(frontier) == 1:
            yield next(iter(frontier))
        last = max(frontier, key=lambda n: n.index)
        if not expandable(last):
            return
        frontier.remove(last)
        frontier.update(last.origins)


def sources(node: Node, expandable: Callable[[Node], bool]) -> Iterator[Node]:
    """Arrays of which `node` is a function, without weights, of expandable nodes; nearest first."""

    def certain(n: Node) -> bool:
        return not any(isinstance(x, Weight) for x in n.operands) and expandable(n)

    return itertools.islice(dominators([node], certain), 1, None)


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
    known: list[Any] = [np.asarray(y) if is_known(y) else None for y in node.operands]
    seen = moved(node, np.arange(x.size).reshape(x.shape), node.operands[1:]) if i == 0 else None
    if seen is not None:
        places = seen[node.output].ravel()
        kept = np.where(places < 0, 0, read.ravel())
        return np.bincount(np.maximum(places, 0), kept, x.size).reshape(x.shape)
    if node.op in REDUCTIONS:
        read = np.expand_dims(read, tuple(node.params["axes"]))
    elif node.op == "dot_general":
        own, other = factors(node)[i], factors(node)[1 - i]
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
    roots: Iterable[Node], known: dict[Any, Any], replace: Callable[[Any], Any] = lambda x: x
) -> list[Any]:
    """Values of the roots, given those of some nodes, and of weights by the id of their posterior.

    Other weights have their mean. `replace` maps the certain operands.
    """
    values = dict(known)

    def value(x: Any) -> Any:
        if isinstance(x, Weight):
            return known.get(id(x.posterior), x.posterior.mean).reshape(-1)[x.places]
        if not isinstance(x, Node):
            return replace(x)
        if x not in values:
            operands = [value(y) for y in x.operands]
            belief = x.op == "belief"
            found = operands if belief else evaluate(x.primitive, operands, x.params)
            values[x] = found[x.output].astype(x.dtype)
        return values[x]

    return [value(x) for x in roots]


def probe(node: Node, source: Node, x: Any, replace: Callable[[Any], Any] = lambda x: x) -> Any:
    """Value of a node at a known value of its source, computed immediately; known if all else is."""
    with jax.ensure_compile_time_eval():
        value = jnp.asarray(x, source.dtype).reshape(source.shape)
        (found,) = compute([node], {source: value}, replace)
        return np.asarray(found, float) if is_known(found) else found


def univariate(node: Node) -> tuple[Node, Callable[[Array], Array]] | None:
    """The node and the scalar function of which `node` is the elementwise image, or None."""

    def expandable(n: Node) -> bool:
        same = all(x.shape == node.shape for x in n.nodes)
        total = n.op == "log" and n.nodes[0].op == "reduce_sum"  # by hand a logsumexp
        return n.op in ELEMENTWISE and same and all_uniform(n) and not total

    found = [x for x in sources(node, expandable) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not found:
        return None
    source = found[-1]

    def fn(x: Array) -> Array:
        def number(constant: Any) -> Array:
            return jnp.asarray(np.asarray(constant).reshape(-1)[0])

        (found,) = compute([node], {source: x.astype(source.dtype)}, number)
        return found.astype(x.dtype)

    return source, fn


def all_uniform(node: Node) -> bool:
    """Whether each certain operand holds one number."""
    return all(isinstance(x, Node) or uniform(x) is not None for x in node.operands)


def follow(node: Node, source: Node) -> np.ndarray | None:
    """Places of `source`'s entries in an array made of it by views and elementwise functions."""
    if node is source:
        return np.arange(source.size).reshape(source.shape)
    if node.op not in VIEWS | ELEMENTWISE:
        return None
    for operand in node.nodes:
        places = follow(operand, source)
        if places is None:
            continue
        seen = moved(node, places, node.operands[1:])
        if seen is not None:
            return seen[node.output]
        if operand.shape == node.shape:
            return places
    return None


def stand_in(constant: Any) -> Any:
    """A known array in place of a traced one: all True, or all NaN."""
    if is_known(constant):
        return constant
    fill = True if constant.dtype == bool else np.nan
    return np.full(constant.shape, fill, constant.dtype)
