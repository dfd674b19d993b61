"""Dense layers with any arrangement of axes, their views, biases and gains, and tied weights."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.layers.dense import dense
from moment_jax.layers.ends import embedding
from moment_jax.layers.params import DenseParams
from moment_jax.posterior import Factorized, FullNormal, Point
from moment_jax.propagation import arrays, regions
from moment_jax.propagation.arrays import Axes, Base, Moments, Places, Sequence
from moment_jax.propagation.errors import LINEARISE, refuse, shapes
from moment_jax.propagation.graph import Node, as_weight, independent, is_random, weights_in
from moment_jax.propagation.propagator import Propagator, pattern, rule
from moment_jax.propagation.weights import Weight, covariance_with, overlap, rescaled, select

LARGEST = 2**24  # most entries of the Jacobian of a factor with a tied weight


@dataclass(frozen=True, eq=False)
class Projection(arrays.View):
    """A view of a dense layer of a sequence."""

    x: Sequence  # (T, D)
    layer: DenseParams  # (D, O)
    places: Places  # of the view's entries, in (T, O)
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
    """A product read as that of an array, on this side, and a weight; and the axes of both."""
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

    Its moments are a belief about it: of independent entries in all structures but `Full`.
    """
    if len(node.nodes) < 2 or not independent(*node.operands):
        return node
    for side in (1, 0):
        kernel = node.operands[side]
        if any(n.op not in {*regions.BY_ROW, "belief"} for n in regions.between(kernel, [])):
            continue
        m = propagator.moments(kernel)
        posterior: Any = Factorized(m.array(), arrays.take(m.base.cov.variance(), m.places))
        if propagator.structure.exact:
            posterior = FullNormal(
                m.array(), m.base.cov.entries(m.places.reshape(1, -1)).cov.reshape(2 * m.shape)
            )
        operands = list(node.operands)
        operands[side] = Weight.of(posterior)
        return replace(node, operands=tuple(operands))
    return node


def _over_tokens(propagator: Propagator, node: Node) -> Moments | None:
    """A kernel over the tokens, the same for all features, or a certain one for each group of them."""
    for side, value, weight, own, other in readings(node):
        m = propagator.moments(value)
        features = m.natural()[1]
        heads = tuple(i for i in own.batch if m.shape[i] > 1)
        if set(own.contracted) & set(features) or not set(heads) <= set(features):
            continue
        known = isinstance(weight.posterior, Point)
        rest = tuple(i for i in own.free if i not in features)  # further axes of tokens
        count = math.prod(m.shape[i] for i in rest)
        places = arrays.as_rows(weight.places, other.batch, other.contracted, other.free)
        kernel = select(weight.posterior, places if known else places[0])
        if kernel is None or (not known and (heads or count > 1)):
            return None
        features = (*heads, *(i for i in features if i not in heads))
        x = m.sequence((*rest, *own.contracted), features)
        mixing = kernel.mean.reshape(places.shape)
        if count > 1:
            mixing = jnp.kron(jnp.eye(count, dtype=mixing.dtype)[None], mixing)
        mixing = mixing.swapaxes(1, 2)  # (H, U, T), for each of H groups of features
        alone = mixing[0] if len(mixing) == 1 else None

        def mixed(of: Any, mixing: Array = mixing, alone: Array | None = alone) -> Any:
            return of.map_heads(mixing) if alone is None else of.map_tokens(alone)

        cov = mixed(x.cov)
        if alone is None:
            groups = x.mean.reshape(len(x.mean), len(mixing), -1)
            mean = jnp.einsum("hut,thk->uhk", mixing, groups).reshape(-1, x.mean.shape[1])
        else:
            mean = alone @ x.mean
        if not known:
            cov = cov.add(x.cov.token_noise(x.mean, kernel))
        # The result has the axes of the batch, of the value and of the kernel, in this order.
        sizes = *(m.shape[i] for i in rest), places.shape[2], *(m.shape[i] for i in features)
        axes = (*rest, -1, *features)
        entries = arrays.numbered(sizes).transpose([axes.index(i) for i in (*heads, *own.free, -1)])
        propagator.note(node, "tokens mixed", "" if known else "input and kernel independent")
        return arrays.made(mean, cov, arrays.in_product(node, side, entries), (x, mixed))
    return None


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
    mean, cov = embedding(flat, belief, propagator.structure, landmarks=propagator.landmarks)
    features = tuple(numbers.offset_dims)
    tokens = tuple(i for i in range(node.ndim) if i not in features)
    propagator.note(node, "embedding", "rows as the family represents them")
    return arrays.made(mean, cov, arrays.ordered(node.shape, tokens, features))


@rule("add", "add_any", "sub", "mul", "div")
def _with_vector(propagator: Propagator, node: Node) -> Moments | None:
    """Plus, minus, times or divided by a weight or a certain array."""
    side = int(isinstance(node.operands[1], Node))  # of the random array
    weight, multiplies = as_weight(node.operands[1 - side]), node.op in ("mul", "div")
    random = weight is not None and not isinstance(weight.posterior, Point)
    if weight is None or (node.op == "div" and (side == 1 or random)):
        return None
    if node.op == "div":
        weight = Weight.of(Point(1 / weight.posterior.mean))
    weight = weight.broadcast(node.shape)
    x = propagator.moments(node.operands[side]).broadcast(node.shape).sequence()
    vector: Any = weight.vector(x.axes[1])  # if it is the same for every token
    if multiplies and random and vector is None:
        return None  # a product like others
    if vector is None:
        other = arrays.as_rows(arrays.take(weight.posterior.mean, weight.places), *x.axes)
    else:
        other = vector.mean.reshape(1, -1)
    if multiplies:
        cov = x.cov.rescale(other)
        if random:
            cov = cov.add(x.cov.gain_noise(x.mean, vector.vector_cov()))
        propagator.note(node, "gain", "input and gain independent" if random else "")
        return x.changed(x.mean * other, cov, node.shape, lambda cross: cross.rescale(other))
    cov = x.cov
    if random and vector is not None:
        cov = cov.add(cov.bias_noise(vector.vector_cov()))
    elif random:
        cov = cov.add(propagator.moments(weight).sequence(*x.axes).cov)
    if node.op == "sub" and side == 1:
        one = jnp.ones((1, x.mean.shape[1]), x.mean.dtype)
        return x.changed(other - x.mean, cov, node.shape, lambda cross: cross.rescale(-one))
    mean = x.mean - other if node.op == "sub" else x.mean + other
    propagator.note(node, *(("bias", "independent") if random else ("shift",)))
    return x.changed(mean, cov, node.shape, lambda cross: cross)


Reader = Callable[[Any], Projection | None]  # of an array


def projection(propagator: Propagator, node: Any) -> Projection | None:
    """An array as a view of a dense layer, with its bias, its scale and a rotation; or None."""
    inner = partial(projection, propagator)

    def read(n: Node) -> Projection | None:
        if n.op == "dot_general":
            return read_dense(propagator, n)
        found = _with_bias(n, inner) if n.op == "add" else None
        found = _scaled(n, inner) if n.op in ("mul", "div") else found
        return _rotated(n, inner) if found is None else found

    return regions.through_views(node, read)


def identity(propagator: Propagator, value: Any, features: Axes) -> Projection:
    """Any array as a layer of itself, rotated if it is; a certain one has these features."""

    def itself(value: Any) -> Projection:
        random = isinstance(value, Node)
        m = propagator.moments(value) if random else propagator.certain(value, features)
        x = m.sequence()
        layer = DenseParams(Point(jnp.eye(x.mean.shape[1], dtype=x.mean.dtype)))
        return Projection(x, layer, arrays.ordered(np.shape(value), *x.axes), value, value)

    return regions.through_views(value, partial(_rotated, inner=itself)) or itself(value)


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
        return replace(found, layer=DenseParams(found.layer.kernel, bias))
    return None


def _scaled(node: Node, inner: Reader) -> Projection | None:
    for value, factor in (node.operands, node.operands[::-1]):
        number = arrays.uniform(factor)
        if number is None or (node.op == "div" and value is not node.operands[0]):
            continue
        found = inner(value)
        return None if found is None else found.times(1 / number if node.op == "div" else number)
    return None


def _rotated(node: Node, inner: Reader) -> Projection | None:
    """A known linear map of the last axis, different for each token, such as rotary positions."""

    def linear(n: Node) -> bool:
        summed = n.op in ("add", "sub", "neg", "concatenate")
        return summed or arrays.is_view(n) or (n.op == "mul" and len(n.nodes) == 1)

    before = regions.sources(node, linear)
    alike = (x for x in before if x.shape == node.shape and x.op != "concatenate")
    source = next(alike, None)
    found = None if source is None else inner(source)
    if source is None or found is None or found.rotation is not None:
        return None
    # The matrix that maps the last axis, by token, (T, K, K), from the images of unit vectors.
    k = node.shape[-1]
    x = np.random.default_rng(0).normal(size=node.shape)
    inputs = [x, *(np.broadcast_to(unit, node.shape) for unit in np.eye(k))]
    outputs = [regions.probe(node, source, value) for value in inputs]
    if not all(map(arrays.is_known, outputs)):
        return None
    expected, *images = (np.reshape(y, (-1, k)) for y in outputs)
    tokens = found.places.reshape(-1, k)[:, 0] // found.layer.kernel.shape[1]
    matrices = np.stack(images, axis=1)[np.unique(tokens, return_index=True)[1]]
    mapped = np.einsum("nj,njk->nk", x.reshape(-1, k), matrices[tokens])
    same = np.allclose(mapped, expected, atol=1e-4)
    return replace(found, rotation=jnp.asarray(matrices)) if same else None


@pattern  # before the rules, which take operands and weights as independent
def _tied(propagator: Propagator, node: Node) -> Moments | None:
    """A product with a weight on which its other factor depends, such as a tied embedding.

    It is a dense layer of its own kernel, and what the covariance of x and the kernel, K, adds: E[dx dw]
    to the mean, and to the covariance, beside cross terms of first order, those of both in dx dw. K is
    the Jacobian of x at the means of all weights times the belief's covariance.
    """
    if not node.tied:
        return None
    known = regions.BY_ROW - {"argmax"} | {"dot_general", "concatenate", "belief", "pad"}
    found = None
    for reading in readings(node) if node.op == "dot_general" else ():
        _, value, weight, own, other = reading
        same = (w for w in weights_in(value) if overlap([w], [weight]))
        differentiable = all(n.op in known for n in regions.between(value, []))
        batch = any(value.shape[i] > 1 for i in own.batch)
        if differentiable and not batch and all(w.posterior is weight.posterior for w in same):
            found = read_dense(propagator, node)
        break
    if found is None:
        raise refuse(
            f"`{node.op}` of random {shapes(node.operands)}, one of them a weight on which another "
            "depends",
            node.source,
            f"One weight can be used twice in products such as a tied embedding. Else {LINEARISE}.",
        )
    belief = weight.posterior
    rows = arrays.as_rows(arrays.numbered(value.shape), own.free, own.contracted)
    columns = arrays.as_rows(weight.places, other.contracted, other.free)
    sizes = value.size * belief.mean.size, rows.size * columns.size, node.size**2
    if max(sizes) > LARGEST:
        raise refuse(
            f"a product with a tied weight, with a covariance of more than {LARGEST} entries",
            node.source,
            f"Use weights of its own, or {LINEARISE}.",
        )

    def of_weight(w: Any) -> Any:
        return regions.compute([value], {id(belief): w})[0].astype(w.dtype).reshape(-1)

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
    return Moments(Base(mean + jnp.einsum("tddv->tv", shared), out, None), found.places)
