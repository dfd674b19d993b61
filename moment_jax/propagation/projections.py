"""Arrays that are a dense layer of a random sequence, with their entries in any arrangement."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.layers.params import DenseParams
from moment_jax.posterior import Posterior
from moment_jax.propagation.dense import read_dense
from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Moments
from moment_jax.propagation.primitives import is_known, is_view, moved, uniform
from moment_jax.propagation.propagator import Propagator, as_weight
from moment_jax.propagation.regions import compute, sources
from moment_jax.propagation.weights import rescaled, select


class Projection(NamedTuple):
    """A view of x @ kernel + bias."""

    input: Moments
    mean: Array  # of x, (T, D)
    cov: Covariance
    kernel: Posterior  # (D, O)
    bias: Posterior | None  # (O,)
    places: np.ndarray  # of the view's entries, in (T, O)
    turn: Array | None = None  # then applied to the last axis, by token, (T, K, K)

    def decoded(self) -> tuple[np.ndarray, np.ndarray]:
        """Token and column of each entry."""
        tokens, columns = np.divmod(self.places, self.kernel.shape[1])
        return tokens, columns

    def params(self, columns: np.ndarray, factor: Any = None) -> DenseParams | None:
        """The dense layer of these columns, times a number; None if its beliefs cannot be expressed."""
        d, width = self.kernel.shape
        # Keys and values shared by several heads are taken as independent copies.
        places = np.arange(d)[:, None] * width + columns[None, :]
        kernel = select(self.kernel, places, repeats=True)
        bias = None if self.bias is None else select(self.bias, columns, repeats=True)
        if kernel is None or (bias is None and self.bias is not None):
            return None
        if factor is not None:
            kernel = rescaled(kernel, factor)
            bias = None if bias is None else rescaled(bias, factor)
        return DenseParams(kernel, bias)


def projection(propagator: Propagator, node: Any) -> Projection | None:
    """An array as a view of a dense layer with its bias, or None."""
    if not isinstance(node, Node):
        return None
    if node.op == "dot_general":
        layer = read_dense(propagator, node)
        if layer is None:
            return None
        mean, cov = layer.x.sequence(layer.tokens, layer.features)
        return Projection(layer.x, mean, cov, layer.kernel, None, layer.places)
    first, *rest = node.operands
    if is_view(node) and not any(map(is_random, rest)) and all(map(is_known, rest)):
        inner = projection(propagator, first)
        if inner is None:
            return None
        places = moved(node.primitive, inner.places, rest, node.params)[node.output]
        return inner._replace(places=places)
    if node.op == "add":
        found = _with_bias(propagator, node)
        if found is not None:
            return found
    found = _scaled(propagator, node) if node.op in ("mul", "div") else None
    return _turned(propagator, node) if found is None else found


def _with_bias(propagator: Propagator, node: Node) -> Projection | None:
    for inner, addend in (node.operands, node.operands[::-1]):
        weight, found = as_weight(addend), projection(propagator, inner)
        if weight is None or found is None:
            continue
        plain = found.bias is None and found.turn is None
        if not plain or found.places.shape != tuple(node.shape):
            return None
        shown = np.broadcast_to(weight.places, node.shape).ravel()
        columns = found.decoded()[1].ravel()
        entries = np.full(found.kernel.shape[1], -1)
        entries[columns] = shown
        if (entries[columns] != shown).any() or (entries < 0).any():
            return None
        return found._replace(bias=select(weight.posterior, entries, repeats=True))
    return None


def _scaled(propagator: Propagator, node: Node) -> Projection | None:
    for inner, factor in (node.operands, node.operands[::-1]):
        number = uniform(factor) if not isinstance(factor, Node) else None
        if number is None or (node.op == "div" and inner is not node.operands[0]):
            continue
        found = projection(propagator, inner)
        if found is None:
            return None
        number = 1 / number if node.op == "div" else number
        bias = None if found.bias is None else rescaled(found.bias, number)
        return found._replace(kernel=rescaled(found.kernel, number), bias=bias)
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
        return _with_turn(node, source, inner)
    return None


def _with_turn(node: Node, source: Node, inner: Projection) -> Projection | None:
    k = node.shape[-1]
    with jax.ensure_compile_time_eval():

        def fn(x: np.ndarray) -> Any:
            return compute(node, {source: jnp.asarray(np.broadcast_to(x, node.shape), node.dtype)})

        outputs = [fn(unit) for unit in np.eye(k)]
        x = np.random.default_rng(0).normal(size=node.shape)
        expected = fn(x)
    if not all(map(is_known, (*outputs, expected))):
        return None
    tokens = inner.decoded()[0].reshape(-1, k)[:, 0]
    rows = np.stack([np.asarray(y).reshape(-1, k) for y in outputs], axis=1)  # (rows, K, K)
    _, first = np.unique(tokens, return_index=True)
    turn = rows[first]
    found = np.einsum("nj,njk->nk", x.reshape(-1, k), turn[tokens])
    if not np.allclose(found, np.asarray(expected).reshape(-1, k), atol=1e-4):
        return None
    return inner._replace(turn=jnp.asarray(turn))
