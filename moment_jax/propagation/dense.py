"""Dense layers with any arrangement of axes, their views, biases and gains."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.layers.dense import dense
from moment_jax.layers.ends import embedding
from moment_jax.layers.params import DenseParams
from moment_jax.posterior import Point
from moment_jax.propagation import arrays, primitives, regions
from moment_jax.propagation.arrays import Axes, Moments, Places, Sequence
from moment_jax.propagation.graph import Node, as_weight, is_random
from moment_jax.propagation.paths import Path
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.weights import Weight, rescaled, select


@dataclass(frozen=True, eq=False, repr=False)
class Projection(arrays.View):
    """A view of a dense layer of a sequence."""

    x: Sequence  # (T, D)
    layer: DenseParams  # (D, O)
    places: arrays.InLayer
    product: Node  # the layer
    source: Any  # its operand that is x
    rotation: Array | None = None  # then applied to the last axis, by token, (T, K, K)

    def decoded(self, *groups: Axes) -> Any:
        """Token and column of each entry, with each group of axes merged into one."""
        return np.divmod(arrays.as_rows(self.places, *groups), self.layer.kernel.shape[1])

    def params(self, columns: Places) -> DenseParams | None:
        """The dense layer of these columns; None if its beliefs cannot be expressed."""
        (kernel, bias), columns = (self.layer.kernel, self.layer.bias), columns.ravel()
        d, width = kernel.shape
        # Keys and values shared by several heads are taken as independent copies.
        chosen = select(kernel, np.arange(d)[:, None] * width + columns, repeats=True)
        shift = None if bias is None else select(bias, columns, repeats=True)
        if chosen is None or (bias is not None and shift is None):
            return None
        return DenseParams(chosen, shift)

    def times(self, number: Any) -> "Projection":
        """The projection times a number."""
        kernel, bias = self.layer.kernel, self.layer.bias
        bias = None if bias is None else rescaled(bias, number)
        return replace(self, layer=DenseParams(rescaled(kernel, number), bias))


def readings(node: Node) -> Iterator[tuple[int, Any, Weight, arrays.Factor, arrays.Factor]]:
    """A product as that of an array, on this side of it, and a weight, and the axes of both."""
    axes = arrays.factors(node)
    for side in (0, 1):
        value, weight = node.operands[side], as_weight(node.operands[1 - side])
        if weight is not None and not isinstance(value, Weight):
            yield side, value, weight, axes[side], axes[1 - side]


def read_dense(
    propagator: Propagator, node: Node, known: Moments | None = None
) -> Projection | None:
    """A `dot_general` as a dense layer, or None if it is another product.

    `known` are the moments of its random operand, if they are not to be computed.
    """
    for side, value, weight, own, other in readings(node):
        # A batch of layers is one layer with a block for each.
        batch = tuple(i for i in own.batch if np.shape(value)[i] > 1)
        features = (*batch, *own.contracted)
        if not isinstance(value, Node):
            x = propagator.certain(value, features)
        else:
            x = propagator.moments(value) if known is None else known
            tokens, shown = x.axes()
            if set(tokens) & set(features) and not set(shown) <= set(features):
                return None  # over tokens alone, unlike patches
        blocks = arrays.as_rows(weight.places, other.batch, other.contracted, other.free)
        n, d, o = blocks.shape
        whole = np.full((n, d, n, o), -1)
        whole[np.arange(n), :, np.arange(n)] = blocks
        kernel = select(weight.posterior, whole.reshape(n * d, n * o))
        if kernel is None:
            return None
        rows = x.sequence((*(i for i in own.batch if i not in batch), *own.free), features)
        entries = arrays.numbered((node.size // (n * o), n, o))  # of (T, n, o)
        places = arrays.in_product(node, side, np.moveaxis(entries, 1, 0))
        return Projection(rows, DenseParams(kernel), places, node, value)
    return None


@rule("dot_general")
def _dense(propagator: Propagator, node: Node) -> Moments | None:
    found = read_dense(propagator, node)
    if found is None:
        return None
    x, layer = found.x, found.layer

    def compute() -> tuple[Any, ...]:
        kernel = layer.kernel.mean
        return *dense(x.mean, x.cov, layer), lambda cross: cross.map_features(kernel)

    propagator.note(node, "dense", "input and kernel independent")
    return arrays.made(compute, (len(x.order), layer.kernel.shape[1]), found.places, x)


@rule("gather")
def _rows(propagator: Propagator, node: Node) -> Moments | None:
    """Rows of a random table; the ids may be traced."""
    table, ids = node.operands
    numbers = node.params["dimension_numbers"]
    if not isinstance(table, Weight) or is_random(ids) or table.ndim != 2:
        return None
    by_row = numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
    whole = by_row and node.params["slice_sizes"][1] == table.shape[1]
    belief = select(table.posterior, table.places) if whole else None
    if belief is None:
        return None
    flat = jnp.reshape(ids, (-1,))

    def compute() -> tuple[Any, ...]:
        return embedding(flat, belief, propagator.structure, landmarks=propagator.landmarks)

    features = tuple(numbers.offset_dims)
    tokens = tuple(i for i in range(node.ndim) if i not in features)
    propagator.note(node, "embedding", "rows as the family represents them")
    shape = len(flat), belief.shape[1]
    return arrays.made(compute, shape, arrays.ordered(node.shape, tokens, features))


class _Pair(NamedTuple):
    """A random array, and a certain one, or a weight that all tokens share, added to it or times it."""

    side: int  # of the random array
    x: Sequence
    mean: Array  # of the other, (1, D) if it is the same for every token, else (T, D)
    belief: Any  # about the other; None if it is certain


def _pair(propagator: Propagator, node: Node) -> _Pair | None:
    side = int(isinstance(node.operands[1], Node))
    weight = as_weight(node.operands[1 - side])
    random = weight is not None and not isinstance(weight.posterior, Point)
    if weight is None or (node.op == "div" and (side == 1 or random)):
        return None
    if node.op == "div":
        weight = Weight.of(Point(1 / weight.posterior.mean))
    weight = weight.broadcast(node.shape)
    x = propagator.moments(node.operands[side]).broadcast(node.shape).sequence()
    vector = weight.vector(x.features)
    if vector is not None:
        return _Pair(side, x, vector.mean.reshape(1, -1), vector if random else None)
    mean = arrays.as_rows(arrays.take(weight.posterior.mean, weight.places), *x.axes)
    return None if random else _Pair(side, x, mean, None)  # else two random arrays, like others


@rule("add", "add_any", "sub")
def _shifted(propagator: Propagator, node: Node) -> Moments | None:
    """Plus or minus a weight or a certain array."""
    pair = _pair(propagator, node)
    if pair is None:
        return None
    x, other = pair.x, pair.mean

    def compute() -> tuple[Any, ...]:
        mean, cov = x.moments
        if pair.belief is not None:
            cov = cov.add(cov.bias_noise(pair.belief.vector_cov()))
        if node.op == "sub" and pair.side == 1:
            one = jnp.ones((1, mean.shape[1]), mean.dtype)
            return other - mean, cov, lambda cross: cross.rescale(-one)
        return mean - other if node.op == "sub" else mean + other, cov, arrays.as_it_is

    if node.op != "sub" or pair.side == 0:
        propagator.note(node, *(("bias", "independent") if pair.belief else ("shift",)))
    return x.made(compute, node.shape)


@rule("mul", "div")
def _gain(propagator: Propagator, node: Node) -> Moments | None:
    """Times a weight, or times or divided by a certain array."""
    pair = _pair(propagator, node)
    if pair is None:
        return None
    x, gain = pair.x, pair.mean

    def compute() -> tuple[Any, ...]:
        cov = x.cov.rescale(gain)
        if pair.belief is not None:
            cov = cov.add(x.cov.gain_noise(x.mean, pair.belief.vector_cov()))
        return x.mean * gain, cov, lambda cross: cross.rescale(gain)

    propagator.note(node, "gain", "input and gain independent" if pair.belief else "")
    return x.made(compute, node.shape)


Reader = Callable[[Any], Projection | None]  # of an array


def projection(propagator: Propagator, node: Any) -> Projection | None:
    """An array as a view of a dense layer, with its bias, its scale and a rotation; or None."""
    inner = partial(projection, propagator)

    def read(n: Node) -> Projection | None:
        if n.op == "dot_general":
            return read_dense(propagator, n)
        found = _with_bias(n, inner) if n.op == "add" else None
        found = _scaled(n, inner) if n.op in ("mul", "div") else found
        return rotated(propagator, n, inner) if found is None else found

    return regions.through_views(node, read)


def identity(propagator: Propagator, value: Any, features: Axes = ()) -> Projection:
    """An array as a layer of itself; it has these features if it is certain, or the same along them."""
    if isinstance(value, Node):
        m = propagator.moments(value)
        (tokens, own), varying = m.natural(), m.axes()[0]
        repeated = tuple(i for i in tokens if i in features and i not in varying)
        tokens = tuple(i for i in tokens if i not in repeated)
        x = m.sequence(tokens, tuple(sorted((*own, *repeated))))
    else:
        x = propagator.certain(value, features).sequence()
    layer = DenseParams(Point(jnp.eye(x.shape[1], dtype=x.dtype)))
    return Projection(x, layer, arrays.ordered(np.shape(value), *x.axes), value, value)


def _with_bias(node: Node, inner: Reader) -> Projection | None:
    for value, addend in (node.operands, node.operands[::-1]):
        weight, found = as_weight(addend), inner(value)
        if weight is None or found is None:
            continue
        plain = found.layer.bias is None and found.rotation is None
        if not plain or found.shape != tuple(node.shape):
            return None
        shown, width = weight.broadcast(node.shape).places.ravel(), found.layer.kernel.shape[1]
        columns = found.places.ravel() % width
        entries = np.full(width, -1)
        entries[columns] = shown
        if (entries[columns] != shown).any() or (entries < 0).any():
            return None
        bias = select(weight.posterior, entries, repeats=True)
        layer = DenseParams(found.layer.kernel, bias)
        return None if bias is None else replace(found, layer=layer)
    return None


def _scaled(node: Node, inner: Reader) -> Projection | None:
    for value, factor in (node.operands, node.operands[::-1]):
        number = primitives.uniform(factor)
        if number is None or (node.op == "div" and value is not node.operands[0]):
            continue
        found = inner(value)
        return None if found is None else found.times(1 / number if node.op == "div" else number)
    return None


def rotated(propagator: Propagator, node: Node, inner: Reader) -> Projection | None:
    """A certain linear map of the last axis, different for each token, such as rotary positions."""

    def linear(n: Node) -> bool:
        summed = n.op in ("add", "sub", "neg", "concatenate")
        return summed or primitives.is_view(n) or (n.op == "mul" and len(n.nodes) == 1)

    for source in regions.sources(node, linear):
        if source.shape != node.shape or source.op == "concatenate":
            continue
        found = inner(source)
        terms = None if found is None else _paths(Path.of(propagator, node), source)
        if found is None or found.rotation is not None or terms is None:
            return None
        rotation = _rotation(terms, found)
        return None if rotation is None else replace(found, rotation=rotation)
    return None


def _paths(path: Path, source: Node) -> list[Path] | None:
    """All paths to an array; None if an operation has no place on one."""
    if path.node is source or (path.places < 0).all():  # or without a part
        return [path]
    found = [_paths(below, source) for below in path.steps()]
    if not found or None in found or path.shifts:
        return None
    return [path for each in found if each is not None for path in each]


def _rotation(terms: list[Path], inner: Projection) -> Any:
    """The matrix that maps the last axis, by token, (T, K, K); None for any other map."""
    k = inner.shape[-1]
    tokens = inner.places.reshape(-1, k)[:, 0] // inner.layer.kernel.shape[1]
    _, first, of_first = np.unique(tokens, return_index=True, return_inverse=True)
    known = all(f.known for t in terms for f in t.factors)
    matrices: Any = (np if known else jnp).zeros((len(first), k, k), inner.x.dtype)
    for t in terms:
        row, column = np.divmod(t.places.reshape(-1, k), k)
        there = t.places.reshape(-1, k) >= 0
        value: Any = np.where(there, 1.0, 0.0)
        for f in t.factors:
            value = value * arrays.take(f.mean, f.places).reshape(-1, k)
        # Heads of one token share its matrix; what is not known is the same if it is the same entry.
        shown = value if known else np.stack([f.places.reshape(-1, k) for f in t.factors])
        alike = np.array_equal(shown[..., first[of_first], :], shown)
        if not (row == np.arange(len(row))[:, None])[there].all() or not alike:
            return None
        if (column != column[first[of_first]])[there].any():
            return None
        entry = np.arange(len(first))[:, None], column[first], np.arange(k)[None]
        if known:
            np.add.at(matrices, entry, value[first])
        else:
            matrices = matrices.at[entry].add(value[first])
    return jnp.asarray(matrices)
