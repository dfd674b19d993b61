"""Parts of the graph that depend on a single random array, as plain functions of it."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.propagation.graph import Node
from moment_jax.propagation.primitives import VIEWS, evaluate, is_known, moved, uniform
from moment_jax.propagation.weights import Weight

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


def sources(node: Node, expandable: Callable[[Node], bool]) -> Iterator[Node]:
    """Nodes through which every path to `node` passes, nearest first."""
    frontier = {node}
    while frontier:
        last = max(frontier, key=lambda n: n.index)
        if any(isinstance(x, Weight) for x in last.operands) or not expandable(last):
            return
        frontier.remove(last)
        frontier.update(last.nodes)
        if len(frontier) == 1:
            yield next(iter(frontier))


def compute(node: Node, known: dict[Node, Any], replace: Callable[[Any], Any] = lambda x: x) -> Any:
    """Value of a node, given the values of `known` nodes; `replace` maps its certain operands."""
    values = dict(known)

    def value(n: Any) -> Any:
        if not isinstance(n, Node):
            return replace(n)
        if n not in values:
            operands = [value(x) for x in n.operands]
            values[n] = evaluate(n.primitive, operands, n.params)[n.output]
        return values[n]

    return value(node)


def probe(node: Node, source: Node, x: Any, replace: Callable[[Any], Any] = lambda x: x) -> Any:
    """Value of a node at a known value of its source, computed immediately; known if all else is."""
    with jax.ensure_compile_time_eval():
        value = jnp.asarray(x, source.dtype).reshape(source.shape)
        found = compute(node, {source: value}, replace)
        return np.asarray(found, float) if is_known(found) else found


def univariate(node: Node) -> tuple[Node, Callable[[Array], Array]] | None:
    """The node and the scalar function of which `node` is the elementwise image, or None."""

    def expandable(n: Node) -> bool:
        same = all(x.shape == node.shape for x in n.nodes)
        return n.op in ELEMENTWISE and same and all_uniform(n)

    found = [x for x in sources(node, expandable) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not found:
        return None
    source = found[-1]

    def fn(x: Array) -> Array:
        def number(constant: Any) -> Array:
            return jnp.asarray(np.asarray(constant).reshape(-1)[0])

        return compute(node, {source: x.astype(source.dtype)}, number).astype(x.dtype)

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
        if operand.size == source.size and operand.shape == node.shape:
            return places
    return None


def stand_in(constant: Any) -> Any:
    """A known array in place of a traced one: all True, or all NaN."""
    if is_known(constant):
        return constant
    fill = True if constant.dtype == bool else np.nan
    return np.full(constant.shape, fill, constant.dtype)
