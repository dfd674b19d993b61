"""Dense layers with any arrangement of axes, their views, biases and gains, and tied weights."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Full
from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.layers.dense import dense
from moment_jax.layers.embedding import embedding
from moment_jax.layers.params import DenseParams
from moment_jax.posterior import Factorized, FullNormal, Point
from moment_jax.propagation import arrays
from moment_jax.propagation.errors import LINEARISE, refuse, shapes
from moment_jax.propagation.graph import Node, as_weight, independent, is_random, weights_in
from moment_jax.propagation.propagator import PATTERNS, Propagator, rule
from moment_jax.propagation.regions import BY_ROW, between, compute, probe, sources
from moment_jax.propagation.weights import Weight, covariance_with, overlap, rescaled, select


class Projection(NamedTuple):
    """A view of a dense layer of a sequence."""

    x: arrays.Sequence  # (T, D)
    layer: DenseParams  # (D, O)
    places: np.ndarray  # of the view's entries, in (T, O)
    product: Node  # the layer
    source: Any  # its operand that is x
    turn: Array | None = None  # then applied to the last axis, by token, (T, K, K)

    def decoded(self, *groups: arrays.Axes) -> Any:
        """Token and column of each entry, with each group of axes merged into one."""
        return np.divmod(arrays.as_rows(self.places, *groups), self.layer.kernel.shape[1])

    def params(self, columns: np.ndarray) -> DenseParams | None:
        """The dense layer of these columns; None if its beliefs cannot be expressed."""
        (kernel, bias), columns = (self.layer.kernel, self.layer.bias), columns.ravel()
        d, width = kernel.shape
        # Keys and values shared by several heads are taken as independent copies.
        chosen = select(kernel, np.arange(d)[:, None] * width + columns, repeats=True)
        shift = None if bias is None else select(bias, columns, repeats=True)
        if chosen is None or (shift is None and bias is not None):
            return None
        return DenseParams(chosen, shift)

    def times(self, number: Any) -> "Projection":
        """The projection times a number."""
        kernel, bias = self.layer.kernel, self.layer.bias
        bias = None if bias is None else rescaled(bias, number)
        return self._replace(layer=DenseParams(rescaled(kernel, number), bias))


def read_dense(
    propagator: Propagator, node: Node, known: arrays.Moments | None = None
) -> Projection | None:
    """A `dot_general` as a dense layer, or None if it is another product.

    `known` are the moments of its random operand, if they are not to be computed.
    """
    for side in (0, 1):
        value, weight = node.operands[side], as_weight(node.operands[1 - side])
        if weight is None or isinstance(value, Weight):
            continue
        own, other = arrays.factors(node)[side], arrays.factors(node)[1 - side]
        certain = not isinstance(value, Node)
        # A batch of layers is one layer with a block for each.
        batch = tuple(i for i in own.batch if np.shape(value)[i] > 1)
        features = (*batch, *own.contracted)
        if certain:
            x = propagator.certain(value, features)
        else:
            x = propagator.moments(value) if known is None else known
        tokens, shown = x.axes()
        if not certain and set(tokens) & set(features) and not set(shown) <= set(features):
            return None  # over tokens alone, unlike patches
        blocks = arrays.as_rows(weight.places, other.batch, other.contracted, other.free)
        n, d, o = blocks.shape
        whole = np.full((n, d, n, o), -1)
        whole[np.arange(n), :, np.arange(n)] = blocks
        kernel = select(weight.posterior, whole.reshape(n * d, n * o))
        if kernel is None:
            return None
        tokens = (*(i for i in own.batch if i not in batch), *own.free)
        rows = x.sequence(tokens, features)
        entries = np.arange(node.size).reshape(-1, n, o)  # of (T, n, o)
        places = arrays.in_product(node, side, np.moveaxis(entries, 1, 0))
        return Projection(rows, DenseParams(kernel), places, node, value)
    return None


@rule("dot_general")
def _dense(propagator: Propagator, node: Node) -> arrays.Moments | None:
    node = _with_kernel(propagator, node)
    found = read_dense(propagator, node)
    if found is None:
        return _over_tokens(propagator, node)
    mean, cov = dense(found.x.mean, found.x.cov, found.layer)
    kernel = found.layer.kernel.mean
    propagator.note(node, "dense", "input and kernel independent")
    return arrays.made(mean, cov, found.places, (found.x, lambda cross: cross.map_features(kernel)))


def _with_kernel(propagator: Propagator, node: Node) -> Node:
    """The product with a kernel that is a function of weights alone, such as a normalised one.

    What that function's moments say of the kernel is a belief about it: with all covariances in `Full`,
    of independent entries in other structures.
    """
    for side in (1, 0):
        kernel = node.operands[side]
        if len(node.nodes) < 2 or not independent(*node.operands):
            return node
        if any(n.op not in {*BY_ROW, "belief"} for n in between(kernel, [])):
            continue
        m = propagator.moments(kernel)
        spread = arrays.taken(m.cov.variance(), m.places)
        posterior: Any = Factorized(m.array(), spread)
        if propagator.structure is Full:
            posterior = FullNormal(m.array(), arrays.entries(m.cov, m.places))
        operands = list(node.operands)
        operands[side] = Weight.of(posterior)
        return dataclasses.replace(node, operands=tuple(operands))
    return node


def _over_tokens(propagator: Propagator, node: Node) -> arrays.Moments | None:
    """A kernel over the tokens, the same for all features, or a certain one for each group of them."""
    for side in (0, 1):
        value, weight = node.operands[side], as_weight(node.operands[1 - side])
        if weight is None or isinstance(value, Weight):
            continue
        own, other = arrays.factors(node)[side], arrays.factors(node)[1 - side]
        m = propagator.moments(value)
        features = m.natural()[1]
        heads = tuple(i for i in own.batch if m.shape[i] > 1)
        if set(own.contracted) & set(features) or not set(heads) <= set(features):
            continue
        known = isinstance(weight.posterior, Point)
        rest = tuple(i for i in own.free if i not in features)  # further axes of tokens
        count = math.prod(m.shape[i] for i in rest)
        kernels = arrays.as_rows(weight.places, other.batch, other.contracted, other.free)
        if not known and (heads or count > 1):
            return None
        features = (*heads, *(i for i in features if i not in heads))
        x = m.sequence((*rest, *own.contracted), features)
        if known:
            weights = arrays.taken(weight.posterior.mean, kernels)
            weights = jnp.kron(jnp.eye(count, dtype=weights.dtype)[None], weights).swapaxes(1, 2)
            mean, cov, carry = _mixed(x, weights)
        else:
            kernel = select(weight.posterior, kernels[0])
            if kernel is None:
                return None
            weights = kernel.mean.T[None]
            mean, cov, carry = _mixed(x, weights)
            cov = cov.add(x.cov.token_noise(x.mean, kernel))
        # The result has the axes of the batch, of the value and of the kernel, in this order.
        shape = [m.shape[i] for i in rest], [node.shape[-1]], [m.shape[i] for i in features]
        new = math.prod(np.shape(node.operands[1 - side])[i] for i in other.free)
        axes = (*rest, -1, *features)
        entries = np.arange(mean.size).reshape([*shape[0], new, *shape[2]])
        order = [axes.index(i) for i in (*heads, *own.free, -1)]
        propagator.note(node, "tokens mixed", "" if known else "input and kernel independent")
        return arrays.made(
            mean, cov, arrays.in_product(node, side, entries.transpose(order)), (x, carry)
        )
    return None


def _mixed(x: arrays.Sequence, weights: Array) -> tuple[Array, Any, arrays.Carry]:
    """Moments of weights_h @ x_h, weights (H, U, T), for each of H groups of features."""
    if len(weights) == 1:
        mapping = weights[0]
        cov = x.cov.map_tokens(mapping)
        return mapping @ x.mean, cov, lambda cross: cross.map_tokens(mapping)
    groups = x.mean.reshape(len(x.mean), len(weights), -1)
    mean = jnp.einsum("hut,thk->uhk", weights, groups).reshape(-1, x.mean.shape[1])
    return mean, x.cov.map_heads(weights), lambda cross: cross.map_heads(weights)


@rule("gather")
def _rows(propagator: Propagator, node: Node) -> arrays.Moments | None:
    """Rows of a random table; the ids may be traced."""
    table, ids = node.operands
    numbers = node.params["dimension_numbers"]
    if not isinstance(table, Weight) or is_random(ids) or table.ndim != 2:
        return None
    by_row = numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
    if not by_row or node.params["slice_sizes"][1] != table.shape[1]:
        return None
    belief = select(table.posterior, table.places)
    if belief is None:
        return None
    flat = jnp.reshape(ids, (-1,))
    mean, cov = embedding(flat, belief, propagator.structure, landmarks=propagator.landmarks)
    features = tuple(numbers.offset_dims)
    tokens = tuple(i for i in range(node.ndim) if i not in features)
    propagator.note(node, "embedding", "rows as the family represents them")
    return arrays.fresh(mean, cov, node.shape, tokens, features, ())


class _Pair(NamedTuple):
    """A random array, and a weight or a certain array that is added to it or multiplies it."""

    side: int  # of the random array
    x: arrays.Sequence
    weight: Weight  # the other, with the same shape
    vector: Any  # the belief about it if it is the same for every token, or None
    mean: Array  # (1, D) then, else (T, D)
    random: bool


def _pair(propagator: Propagator, node: Node) -> _Pair | None:
    side = int(isinstance(node.operands[1], Node))
    weight = as_weight(node.operands[1 - side])
    if weight is None:
        return None
    random = not isinstance(weight.posterior, Point)
    if node.op == "div" and (side == 1 or random):
        return None
    if node.op == "div":
        weight = Weight.of(Point(1 / weight.posterior.mean))
    weight = weight.broadcast(node.shape)
    x = propagator.moments(node.operands[side]).broadcast(node.shape).sequence()
    vector = weight.vector(x.features)
    if vector is None:
        mean = arrays.as_rows(arrays.taken(weight.posterior.mean, weight.places), *x.axes)
    else:
        mean = vector.mean.reshape(1, -1)
    return _Pair(side, x, weight, vector, mean, random)


@rule("add", "add_any", "sub")
def _shifted(propagator: Propagator, node: Node) -> arrays.Moments | None:
    """Plus or minus a weight or a certain array."""
    pair = _pair(propagator, node)
    if pair is None:
        return None
    x, cov = pair.x, pair.x.cov
    if pair.random and pair.vector is not None:
        cov = cov.add(cov.bias_noise(pair.vector.vector_cov()))
    elif pair.random:
        cov = cov.add(propagator.moments(pair.weight).sequence(*x.axes).cov)
    if node.op == "sub" and pair.side == 1:
        one = jnp.ones((1, x.mean.shape[1]), x.mean.dtype)
        return x.changed(pair.mean - x.mean, cov, node.shape, lambda cross: cross.rescale(-one))
    mean = x.mean - pair.mean if node.op == "sub" else x.mean + pair.mean
    propagator.note(node, *(("bias", "independent") if pair.random else ("shift",)))
    return x.changed(mean, cov, node.shape, arrays.as_it_is)


@rule("mul", "div")
def _gain(propagator: Propagator, node: Node) -> arrays.Moments | None:
    """Times a weight, or times or divided by a certain array."""
    pair = _pair(propagator, node)
    if pair is None:
        return None
    if pair.random and pair.vector is None:
        return None  # a product like others
    x = pair.x
    cov = x.cov.rescale(pair.mean)
    if pair.random:
        cov = cov.add(x.cov.gain_noise(x.mean, pair.vector.vector_cov()))
    propagator.note(node, "gain", "input and gain independent" if pair.random else "")
    return x.changed(x.mean * pair.mean, cov, node.shape, lambda cross: cross.rescale(pair.mean))


def projection(propagator: Propagator, node: Any) -> Projection | None:
    """An array as a view of a dense layer with its bias, or None."""
    if not isinstance(node, Node):
        return None
    if node.op == "dot_general":
        return read_dense(propagator, node)
    first, *rest = node.operands
    if arrays.is_view(node) and all(map(arrays.is_known, rest)):
        inner = projection(propagator, first)
        if inner is None:
            return None
        places = arrays.moved(node, inner.places, rest)
        return None if places is None else inner._replace(places=places[node.output])
    found = None
    if node.op == "add":
        found = _with_bias(propagator, node)
    elif node.op in ("mul", "div"):
        found = _scaled(propagator, node)
    return turned(propagator, node, projection) if found is None else found


def _with_bias(propagator: Propagator, node: Node) -> Projection | None:
    for inner, addend in (node.operands, node.operands[::-1]):
        weight, found = as_weight(addend), projection(propagator, inner)
        if weight is None or found is None:
            continue
        plain = found.layer.bias is None and found.turn is None
        if not plain or found.places.shape != tuple(node.shape):
            return None
        shown = weight.broadcast(node.shape).places.ravel()
        width = found.layer.kernel.shape[1]
        columns = found.places.ravel() % width
        entries = np.full(width, -1)
        entries[columns] = shown
        if (entries[columns] != shown).any() or (entries < 0).any():
            return None
        bias = select(weight.posterior, entries, repeats=True)
        return found._replace(layer=DenseParams(found.layer.kernel, bias))
    return None


def _scaled(propagator: Propagator, node: Node) -> Projection | None:
    for inner, factor in (node.operands, node.operands[::-1]):
        number = arrays.uniform(factor)
        if number is None or (node.op == "div" and inner is not node.operands[0]):
            continue
        found = projection(propagator, inner)
        return None if found is None else found.times(1 / number if node.op == "div" else number)
    return None


def turned(
    propagator: Propagator, node: Node, inner_of: Callable[[Propagator, Node], Projection | None]
) -> Projection | None:
    """A known linear map of the last axis, different for each token, such as rotary positions."""

    def linear(n: Node) -> bool:
        summed = n.op in ("add", "sub", "neg", "concatenate")
        return summed or arrays.is_view(n) or (n.op == "mul" and len(n.nodes) == 1)

    for source in sources(node, linear):
        if source.shape != node.shape or source.op == "concatenate":
            continue
        inner = inner_of(propagator, source)
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
    if not all(map(arrays.is_known, outputs)):
        return None
    expected, *images = (np.reshape(y, (-1, k)) for y in outputs)
    tokens = inner.places.reshape(-1, k)[:, 0] // inner.layer.kernel.shape[1]
    _, first = np.unique(tokens, return_index=True)
    turn = np.stack(images, axis=1)[first]
    found = np.einsum("nj,njk->nk", x.reshape(-1, k), turn[tokens])
    return turn if np.allclose(found, expected, atol=1e-4) else None


LARGEST = 2**24  # most entries of a Jacobian
_DIFFERENTIABLE = BY_ROW | {"dot_general", "concatenate", "belief", "pad"}


def _tied(propagator: Propagator, node: Node) -> arrays.Moments | None:
    """A dense layer of its own kernel, and what the covariance of x and the kernel, K, adds.

    That is E[dx dw] to the mean, and to the covariance, beside cross terms of first order, those of both
    in dx dw. K is the Jacobian of x at the means of all weights times the belief's covariance.
    """
    if not node.tied:
        return None
    side = int(isinstance(node.operands[0], Weight))
    value, weight = node.operands[side], node.operands[1 - side]
    found = None
    if node.op == "dot_general" and isinstance(value, Node) and isinstance(weight, Weight):
        same = (w for w in weights_in(value) if overlap([w], [weight]))
        known = all(n.op in _DIFFERENTIABLE - {"argmax"} for n in between(value, []))
        if known and all(w.posterior is weight.posterior for w in same):
            batch = any(value.shape[i] > 1 for i in arrays.factors(node)[side].batch)
            found = None if batch else read_dense(propagator, node)
    if found is None:
        raise refuse(
            f"`{node.op}` of random {shapes(node.operands)}, one of them a weight on which another "
            "depends",
            node.source,
            f"One weight can be used twice in products such as a tied embedding. Else {LINEARISE}.",
        )
    belief, own, other = (
        weight.posterior,
        arrays.factors(node)[side],
        arrays.factors(node)[1 - side],
    )
    rows = arrays.as_rows(np.arange(value.size).reshape(value.shape), own.free, own.contracted)
    columns = arrays.as_rows(weight.places, other.contracted, other.free)
    sizes = value.size * belief.mean.size, rows.size * columns.size, node.size**2
    if max(sizes) > LARGEST:
        raise refuse(
            f"a product with a tied weight, with a covariance of more than {LARGEST} entries",
            node.source,
            f"Use weights of its own, or {LINEARISE}.",
        )

    def of_weight(w: Any) -> Any:
        return compute([value], {id(belief): w})[0].astype(w.dtype).reshape(-1)

    jacobian = jax.jacrev(of_weight)(belief.mean).reshape(value.size, -1)
    shared = covariance_with(belief, jacobian)[rows[:, :, None, None], columns[None, None]]
    x, cov, layer = found.x.mean, found.x.cov, found.layer
    mean, out = dense(x, cov, layer)
    kernel = layer.kernel.mean
    cross = jnp.einsum("dv,tdeu,se->tvsu", kernel, shared, x)
    # The Jacobian at the means may be steeper than expected: keep to Cauchy's inequality.
    through, noise = cov.map_features(kernel), cov.weight_noise(x, layer.kernel)
    share = safe_divide(through.sd() * noise.sd(), jnp.abs(jnp.einsum("tvtv->tv", cross)))
    share = jnp.where(share > 0, safe_sqrt(jnp.minimum(share, 1)), 0)
    cross = share[:, :, None, None] * cross * share[None, None]
    bent = jnp.einsum("tdeu,sedv->tvsu", shared, shared)
    out = out.add(out.projected(cross + jnp.transpose(cross, (2, 3, 0, 1)) + bent))
    propagator.note(node, "tied weights", "input and kernel jointly Gaussian, to first order")
    return arrays.Moments(
        arrays.Base(mean + jnp.einsum("tddv->tv", shared), out, None), found.places
    )


# Before the others, which assume that operands and weights are independent.
PATTERNS.insert(0, _tied)
