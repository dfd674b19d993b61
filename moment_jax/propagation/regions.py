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


def weights_of(
    root: Node, starts: Iterable[Any], operands: Callable[[Node], list[Node]] = lambda n: n.origins
) -> list[Weight]:
    """The weights that an array depends on other than through `starts`, or a decoder's memory."""
    nodes = sorted(between(root, starts, operands), key=lambda n: n.index)
    weights = (x for n in nodes for x in n.operands if isinstance(x, Weight))
    return list(dict.fromkeys(x for x in weights if not isinstance(x.posterior, Point)))


def between(
    root: Node, starts: Iterable[Any], operands: Callable[[Node], list[Node]] = lambda n: n.nodes
) -> set[Node]:
    """The nodes that an array depends on, down to but without `starts`."""
    seen: set[Node] = set()
    stack, ends = [root], set(starts)
    while stack:
        node = stack.pop()
        if node in ends or node in seen:
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
