"""Arrays that are a dense layer of a random sequence, with their entries in any arrangement."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.layers.params import DenseParams
from moment_jax.posterior import Posterior
from moment_jax.propagation.dense import read_dense
from moment_jax.propagation.graph import Node, as_weight
from moment_jax.propagation.moments import Axes, Sequence, as_rows
from moment_jax.propagation.primitives import is_known, is_view, moved, uniform
from moment_jax.propagation.propagator import Propagator
from moment_jax.propagation.regions import probe, sources
from moment_jax.propagation.weights import rescaled, select


class Projection(NamedTuple):
    """A view of x @ kernel + bias."""

    x: Sequence  # (T, D)
    kernel: Posterior  # (D, O)
    bias: Posterior | None  # (O,)
    places: np.ndarray  # of the view's entries, in (T, O)
    turn: Array | None = None  # then applied to the last axis, by token, (T, K, K)

    def decoded(self, *groups: Axes) -> tuple[np.ndarray, np.ndarray]:
        """Token and column of each entry, with each group of axes merged into one."""
        tokens, columns = np.divmod(as_rows(self.places, *groups), self.kernel.shape[1])
        return tokens, columns

    def params(self, columns: np.ndarray) -> DenseParams | None:
        """The dense layer of these columns; None if its beliefs cannot be expressed."""
        d, width = self.kernel.shape
        # Keys and values shared by several heads are taken as independent copies.
        places = np.arange(d)[:, None] * width + columns.ravel()
        kernel = select(self.kernel, places, repeats=True)
        bias = None if self.bias is None else select(self.bias, columns.ravel(), repeats=True)
        if kernel is None or (bias is None and self.bias is not None):
            return None
        return DenseParams(kernel, bias)

    def times(self, number: Any) -> "Projection":
        """The projection times a number."""
        bias = None if self.bias is None else rescaled(self.bias, number)
        return self._replace(kernel=rescaled(self.kernel, number), bias=bias)


def projection(propagator: Propagator, node: Any) -> Projection | None:
    """An array as a view of a dense layer with its bias, or None."""
    if not isinstance(node, Node):
        return None
    if node.op == "dot_general":
        layer = read_dense(propagator, node)
        return None if layer is None else Projection(layer.x, layer.kernel, None, layer.places)
    first, *rest = node.operands
    if is_view(node) and all(map(is_known, rest)):
        inner = projection(propagator, first)
        if inner is None:
            return None
        places = moved(node, inner.places, rest)
        return None if places is None else inner._replace(places=places[node.output])
    found = None
    if node.op == "add":
        found = _with_bias(propagator, node)
    elif node.op in ("mul", "div"):
        found = _scaled(propagator, node)
    return _turned(propagator, node) if found is None else found


def _with_bias(propagator: Propagator, node: Node) -> Projection | None:
    for inner, addend in (node.operands, node.operands[::-1]):
        weight, found = as_weight(addend), projection(propagator, inner)
        if weight is None or found is None:
            continue
        plain = found.bias is None and found.turn is None
        if not plain or found.places.shape != tuple(node.shape):
            return None
        shown = weight.broadcast(node.shape).places.ravel()
        columns = found.places.ravel() % found.kernel.shape[1]
        entries = np.full(found.kernel.shape[1], -1)
        entries[columns] = shown
        if (entries[columns] != shown).any() or (entries < 0).any():
            return None
        return found._replace(bias=select(weight.posterior, entries, repeats=True))
    return None


def _scaled(propagator: Propagator, node: Node) -> Projection | None:
    for inner, factor in (node.operands, node.operands[::-1]):
        number = uniform(factor)
        if number is None or (node.op == "div" and inner is not node.operands[0]):
            continue
        found = projection(propagator, inner)
        return None if found is None else found.times(1 / number if node.op == "div" else number)
    return None


def _turned(propagator: Propagator, node: Node) -> Projection | None:
    """A known linear map of the last axis, different for each token, such as rotary positions."""

    def linear(n: Node) -> bool:
        summed = n.op in ("add", "sub", "neg", "concatenate")
        return summed or is_view(n) or (n.op == "mul" and len(n.nodes) == 1)

    for source in sources(node, linear):
        if source.shape != node.shape or source.op == "concatenate":
            continue
        inner = projection(propagator, source)
        if inner is None or inner.turn is not None:
            return None
        turn = _turn(node, source, inner)
        return None if turn is None else inner._replace(turn=jnp.asarray(turn))
    return None


def _turn(node: Node, source: Node, inner: Projection) -> np.ndarray | None:
    """The matrix that maps the last axis, by token, (T, K, K); None for any other map."""
    k = node.shape[-1]
    x = np.random.default_rng(0).normal(size=node.shape)
    inputs = [x, *(np.broadcast_to(unit, node.shape) for unit in np.eye(k))]
    outputs = [probe(node, source, value) for value in inputs]
    if not all(map(is_known, outputs)):
        return None
    expected, *images = (np.reshape(y, (-1, k)) for y in outputs)
    tokens = inner.places.reshape(-1, k)[:, 0] // inner.kernel.shape[1]
    _, first = np.unique(tokens, return_index=True)
    turn = np.stack(images, axis=1)[first]
    found = np.einsum("nj,njk->nk", x.reshape(-1, k), turn[tokens])
    return turn if np.allclose(found, expected, atol=1e-4) else None
