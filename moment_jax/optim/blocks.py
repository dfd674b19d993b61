"""Layers as matrices of parameters, found by their type; those of one kind and shape are stacked."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.nnx.nn.linear import canonicalize_padding
from jax import Array

from moment_jax.nn.bayesian import Bayesian
from moment_jax.optim import curvature
from moment_jax.optim.curvature import DiagonalFactor, EmbeddingFactor, KroneckerFactor

Shape = tuple[int, ...]

LEAST = 64  # a shorter side counts as one of this length
MOST_RATIO = (
    4.5  # of sides, up to which a layer is whole: those of Transformers take 6 % more steps cut
)


def path_name(path: tuple[Any, ...]) -> str:
    """The path of a leaf, joined by "/", without the `value` of a variable."""
    keys = (key for key in path if key != jax.tree_util.GetAttrKey("value"))
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """All arrays of a tree by path, without those that a mask hides."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    return {path_name(path): leaf for path, leaf in leaves}


@dataclasses.dataclass(frozen=True)
class LayerBlock:
    """The parameters of one layer as a (rows, columns) matrix, or a stack of such matrices.

    Rows are those of a dense layer's kernel, then its bias; the symbols of an embedding; the gains and
    the biases of a normalisation, either of which may be missing. A dense layer with a
    side much longer than the other is cut into parts, about square and padded by zeros, which count as
    layers of their own: its factors would be many times as large as the layer.
    """

    name: str  # path of the layer in the model, joined by "/"
    leaves: tuple[str, ...]  # paths of its parameters, in the order of their rows
    shapes: tuple[Shape, ...]  # of the parameters
    columns: int  # width of the matrix
    stack: Shape = ()  # leading axes of all parameters, over which equal layers are scanned
    factor: Any = KroneckerFactor  # the type of its curvature

    @property
    def rows(self) -> int:
        """Height of the matrix."""
        return sum(map(math.prod, self.shapes)) // (self.columns * math.prod(self.stack))

    @property
    def parts(self) -> tuple[int, int]:
        """How many parts stand below each other and side by side; one of them is 1."""

        def number(side: int, other: int) -> int:
            ratio = side / max(other, LEAST)
            return round(ratio) if ratio > MOST_RATIO and self.factor is KroneckerFactor else 1

        return number(self.rows, self.columns), number(self.columns, self.rows)

    @property
    def part(self) -> tuple[int, int]:
        """Height and width of a part."""
        return -(-self.rows // self.parts[0]), -(-self.columns // self.parts[1])

    @property
    def lead(self) -> Shape:
        """Leading axes of what is kept of all parts."""
        return (*self.stack, math.prod(self.parts)) if self.parts != (1, 1) else self.stack

    @property
    def count(self) -> int:
        """Number of parts in the stack."""
        return math.prod(self.lead)

    @property
    def factor_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the arrays of one part's factor."""
        height, width = self.part
        if self.factor is DiagonalFactor:
            return ((height, width),)
        inputs = (height,) if self.factor is EmbeddingFactor else (height, height)
        return inputs, (width, width)

    def no_factor(self, dtype: jnp.dtype, *lead: int) -> Any:
        """A factor of zeros, of weight zero, with these leading axes."""
        arrays = (jnp.zeros((*lead, *shape), dtype) for shape in self.factor_shapes)
        return self.factor(*arrays, jnp.zeros((), dtype))

    def matrix(self, leaves: Mapping[str, Array]) -> Array:
        """The parameters as one array (count, *part)."""
        layers, (down, across), (height, width) = math.prod(self.stack), self.parts, self.part
        each = [leaves[leaf].reshape(layers, -1, self.columns) for leaf in self.leaves]
        more = (0, down * height - self.rows), (0, across * width - self.columns)
        whole = jnp.pad(jnp.concatenate(each, axis=1), ((0, 0), *more))
        return whole.reshape(-1, height, across, width).swapaxes(1, 2).reshape(-1, height, width)

    def split(self, matrix: Array) -> dict[str, Array]:
        """The inverse of `matrix`."""
        layers, (down, across), (height, width) = math.prod(self.stack), self.parts, self.part
        whole = matrix.reshape(-1, across, height, width).swapaxes(1, 2)
        whole = whole.reshape(layers, down * height, across * width)[..., : self.columns]
        rows = [math.prod(shape) // (self.columns * layers) for shape in self.shapes]
        each = jnp.split(whole[:, : self.rows], list(itertools.accumulate(rows[:-1])), axis=1)
        by_leaf = zip(self.leaves, self.shapes, each, strict=True)
        return {leaf: rows.reshape(shape) for leaf, shape, rows in by_leaf}


Blocks = tuple[LayerBlock, ...]
Groups = dict[str, Blocks]
Matrices = dict[str, Array]  # by group, (L, rows, columns)


def groups_of(tree: Any, blocks: Blocks) -> Groups:
    """The groups of parameters or gradients by kind and shape; a mask may hide whole blocks.

    ValueError if a parameter belongs to no block, or a block's is missing or of another shape.
    """
    shapes = {path: tuple(jnp.shape(leaf)) for path, leaf in flatten(tree).items()}
    masked = flatten(tree, lambda node: isinstance(node, optax.MaskedNode)).keys() - shapes.keys()
    found = tuple(block for block in blocks if not masked >= set(block.leaves))
    if not found or not shapes:
        raise ValueError(
            "A second-order method needs a layer with curvature factors. Got parameters "
            f"{', '.join(shapes) or 'none'}. See mj.optim.find_blocks."
        )
    groups: Groups = {}
    for block in found:
        for leaf, shape in zip(block.leaves, block.shapes, strict=True):
            if leaf in masked:
                raise ValueError(
                    f"The curvature of layer {block.name!r} is that of all its parameters, "
                    f"{', '.join(block.leaves)}, and a mask hides {leaf!r}. Mask whole layers only."
                )
            if shapes.pop(leaf, None) != shape:
                raise ValueError(
                    f"Layer {block.name!r} needs its parameter {leaf!r} of shape {shape}. Give blocks="
                    "mj.optim.find_blocks(model) of the trained model."
                )
        kind = block.factor.__name__.removesuffix("Factor").lower()
        key = f"{kind}_{block.part[0]}x{block.part[1]}"
        groups[key] = (*groups.get(key, ()), block)
    for path in shapes:
        raise ValueError(
            f"Parameter {path!r} belongs to no layer with curvature factors. Leave it to another "
            "optimiser: mj.optim.for_model(model, ...) gives it to Adam, by optax.partition."
        )
    return groups


def stack(groups: Groups, tree: Any) -> Matrices:
    """The parameters of every group as one array (L, rows, columns)."""
    leaves = flatten(tree)
    parts = {key: [block.matrix(leaves) for block in blocks] for key, blocks in groups.items()}
    return {key: jnp.concatenate(each) for key, each in parts.items()}


def unstack(groups: Groups, matrices: Matrices, like: Any) -> Any:
    """The inverse of `stack`: a tree like the given one."""
    leaves: dict[str, Array] = {}
    for key, blocks in groups.items():
        ends = itertools.accumulate(block.count for block in blocks[:-1])
        for block, part in zip(blocks, jnp.split(matrices[key], list(ends)), strict=True):
            leaves |= block.split(part)
    return jax.tree_util.tree_map_with_path(
        lambda path, old: leaves[path_name(path)].astype(old.dtype), like
    )


def stack_factors(groups: Groups, factors: Any) -> tuple[curvature.Factors, Array]:
    """The factors of every group, stacked, and whether all are finite; raises unless each fits."""
    if not isinstance(factors, Mapping):
        raise TypeError(
            "A second-order method needs update(grads, state, params, factors=factors) at every step, "
            "with those of mj.optim.value_grad_and_factors. For steps without new curvature give it "
            f"when=mj.optim.curvature_due(state). Got {type(factors).__name__}."
        )
    stacked: curvature.Factors = {}
    finite = []
    for key, blocks in groups.items():
        each: list[Any] = [factors.get(block.name) for block in blocks]
        for block, factor in zip(blocks, each, strict=True):
            shapes = [(block.count, *shape) for shape in block.factor_shapes]
            if not isinstance(factor, block.factor) or [x.shape for x in factor[:-1]] != shapes:
                raise ValueError(
                    f"Layer {block.name!r} ({', '.join(block.leaves)}) needs a "
                    f"{block.factor.__name__} of arrays {shapes}. Got {jax.tree.map(jnp.shape, factor)}."
                    " Take factors from mj.optim.value_grad_and_factors, blocks from "
                    "mj.optim.find_blocks; or leave the layer to another optimiser: optax.partition."
                )
        # Asked before stacking, which avoids storing the stacked array.
        finite += [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(each)]
        weight = jnp.min(jnp.stack([factor.weight for factor in each]))
        arrays = map(jnp.concatenate, zip(*(factor[:-1] for factor in each), strict=True))
        stacked[key] = blocks[0].factor(*arrays, weight)
    return stacked, jnp.all(jnp.stack(finite))


# -- the layers of a model -----------------------------------------------------------------------------


def find_blocks(model: nnx.Module, wrt: Any = nnx.Param) -> Blocks:
    """The curvature blocks of a model: one for each layer whose factors can be captured.

    Of `nnx.Linear`, `LinearGeneral` (hence of `MultiHeadAttention`), `Embed`, `LayerNorm`, `RMSNorm`,
    ungrouped `Conv`, and subclasses that keep `__call__`; of an `mj.Bayesian` the means of its beliefs,
    and weights that are certain. A layer whose parameters are not all trained, by the filter `wrt`, or
    shared with an earlier one has no block. The model may be abstract. ValueError without any block.
    """
    available = set(flatten(nnx.state(model, wrt)))
    blocks = []
    for _, block in observed(model):
        if set(block.leaves) <= available:
            available -= set(block.leaves)
            blocks.append(block)
    if not blocks:
        raise ValueError(
            "`find_blocks` needs a model with trained layers that have curvature factors, such as "
            f"nnx.Linear; mj.optim.find_blocks lists them. Got {type(model).__name__} without any."
        )
    return tuple(blocks)


def _shapes_at_means(bayesian: Bayesian) -> Any:
    """The plain network with shapes for arrays, which may be all that the model itself has."""

    def network(bayesian: Bayesian) -> Any:
        plain = bayesian.at_means()
        return plain if isinstance(plain, nnx.Module) else ()  # one of linen has no layers of NNX

    return nnx.eval_shape(network, bayesian)


def observed(
    model: Any, at_means: Callable[[Bayesian], Any] = _shapes_at_means
) -> Iterator[tuple[Any, LayerBlock]]:
    """The observed layers; those of an `mj.Bayesian` are the layers of `at_means` of it."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Bayesian):
            for layer, block in observed(at_means(node)):
                yield layer, _of_means(block, path, node)
        elif isinstance(node, nnx.Module):
            found = _block("/".join(map(str, path)), node)
            if found is not None:
                yield node, found


def _of_means(block: LayerBlock, path: tuple[Any, ...], bayesian: Bayesian) -> LayerBlock:
    """The block of a plain network's layer, of the variables that a Bayesian at this path has for it."""
    owned = {"/".join(map(str, own)): belief for own, belief in bayesian.owned.items()}
    prefix = "/".join(map(str, (*path, "weights")))
    leaves, shapes = list(block.leaves), list(block.shapes)
    for i, leaf in enumerate(block.leaves):
        leaves[i] = f"{prefix}/{leaf}"
        if leaf in owned:  # the mean of a family of matrices is a matrix
            leaves[i], shapes[i] = f"{leaves[i]}/mean", tuple(owned[leaf].mean.shape)
    name = f"{prefix}/{block.leaves[0]}".rpartition("/")[0]
    return dataclasses.replace(block, name=name, leaves=tuple(leaves), shapes=tuple(shapes))


def known(cls: Any) -> Any:
    """The observed layer that a class is, or is a subclass of without overriding its call; or None."""
    bases = (b for b in ARRANGE if issubclass(cls, b) and cls.__call__ is b.__call__)
    return next(bases, None)


def _block(name: str, layer: Any) -> LayerBlock | None:
    """The parameters of a layer, or None if it is not observed."""
    if known(type(layer)) is None or not _is_plain(layer):
        return None
    leaves = [leaf for leaf in (*KINDS, "bias") if getattr(layer, leaf, None) is not None]
    if not leaves:
        return None
    paths = tuple(f"{name}/{leaf}" if name else leaf for leaf in leaves)
    shapes = tuple(tuple(getattr(layer, leaf).shape) for leaf in leaves)
    kind, shape = KINDS.get(leaves[0], DiagonalFactor), shapes[0]  # a norm may have biases alone
    outputs, own = 1, 2 if kind is EmbeddingFactor else 1
    if kind is KroneckerFactor:
        outputs = np.size(getattr(layer, "out_features", 1))
        inputs = np.size(getattr(layer, "in_features", 1)) + len(getattr(layer, "kernel_size", ()))
        own = inputs + outputs
    columns = math.prod(shape[len(shape) - outputs :])
    return LayerBlock(name or "model", paths, shapes, columns, shape[: len(shape) - own], kind)


def _is_plain(layer: Any) -> bool:
    """Whether a layer of Flax has no option that its arrangement leaves out."""
    if isinstance(layer, nnx.LinearGeneral):
        return not layer.batch_axis
    if isinstance(layer, nnx.LayerNorm | nnx.RMSNorm):
        axes = (layer.reduction_axes, layer.feature_axes)
        return layer.axis_name is None and axes == (-1, -1)
    if isinstance(layer, nnx.Conv):
        plain = layer.feature_group_count == 1 and getattr(layer, "mask", None) is None
        return plain and (not isinstance(layer.padding, str) or layer.padding in ("SAME", "VALID"))
    return True


# -- the calls of each kind of layer -------------------------------------------------------------------


def _examples(array: Array, num_features: int) -> Array:
    """(N, ..., features) -> (N, T, features), the last `num_features` axes made one."""
    first, *lead = array.shape[: array.ndim - num_features] or (1,)
    width = math.prod(array.shape[array.ndim - num_features :])
    return array.reshape(first, math.prod(lead), width)


def _dense(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    axes = getattr(layer, "axis", (-1,))
    moved = jnp.moveaxis(inputs, axes, range(-len(axes), 0))
    return _examples(moved, len(axes)), _examples(output, np.size(layer.out_features))


def _norm(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    x = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    if isinstance(layer, nnx.LayerNorm):
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    square = jnp.mean(x**2, axis=-1, keepdims=True)
    return _examples(x * jax.lax.rsqrt(square + layer.epsilon), 1), _examples(output, 1)


def _conv(layer: Any, inputs: Array, output: Array) -> tuple[Array, Array]:
    """Patches (N, T, height * width * channels) in the kernel's order, and the output (N, T, out)."""
    rank, channels = len(layer.kernel_size), inputs.shape[-1]
    first = inputs.shape[0] if inputs.ndim > rank + 1 else 1
    images = inputs.reshape(-1, *inputs.shape[-rank - 1 :])
    strides, dilation, kernel_dilation = (
        np.broadcast_to(value or 1, rank).tolist()
        for value in (layer.strides, layer.input_dilation, layer.kernel_dilation)
    )
    patches = jax.lax.conv_general_dilated_patches(
        jnp.moveaxis(images, -1, 1), layer.kernel_size, strides,
        canonicalize_padding(layer.padding, rank),
        lhs_dilation=dilation, rhs_dilation=kernel_dilation,
    )  # fmt: skip
    # (M, channels * kernel, *places) -> (M, places, kernel * channels)
    rows = patches.reshape(len(images), channels, math.prod(layer.kernel_size), -1)
    rows = rows.transpose(0, 3, 2, 1).reshape(first, -1, channels * rows.shape[2])
    return rows, output.reshape(first, -1, output.shape[-1])


KINDS = {"kernel": KroneckerFactor, "embedding": EmbeddingFactor, "scale": DiagonalFactor}
# Observed layers, and how a call of each is arranged: (layer, inputs, output) of a call -> inputs
# (N, T, in) and output (N, T, out). Add a new layer here.
ARRANGE: dict[type[nnx.Module], Callable[[Any, Array, Array], tuple[Array, Array]]] = {
    nnx.Linear: _dense,
    nnx.LinearGeneral: _dense,
    nnx.Embed: lambda _, ids, output: (_examples(ids, 0), _examples(output, 1)),
    nnx.LayerNorm: _norm,
    nnx.RMSNorm: _norm,
    nnx.Conv: _conv,
}
