"""The parameters of a layer as one matrix, and layers of one kind and shape stacked into one array."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from moment_jax.optim.factors import (
    DiagonalFactor,
    EmbeddingFactor,
    Factor,
    Factors,
    KroneckerFactor,
    RowFactor,
    Shape,
    shapes_of,
)


def path_name(path: tuple[Any, ...]) -> str:
    """The path of a leaf, joined by "/", without the `value` of a variable."""
    keys = (key for key in path if key != jax.tree_util.GetAttrKey("value"))
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """All arrays of a tree by path, without those that a mask hides."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    return {path_name(path): leaf for path, leaf in leaves}


def unflatten(tree: Any, leaves: dict[str, Array]) -> Any:
    """A tree like `tree` with these arrays."""
    return jax.tree_util.tree_map_with_path(
        lambda path, old: leaves[path_name(path)].astype(old.dtype), tree
    )


@dataclasses.dataclass(frozen=True)
class LayerBlock:
    """The parameters of one layer as a (rows, columns) matrix, or a stack of such matrices.

    The rows of a dense layer are its kernel's, then its bias; of an embedding, one for each symbol; of a
    normalisation, its gains and its biases, either of which may be missing.
    """

    name: str  # path of the layer in the model, joined by "/"
    leaves: tuple[str, ...]  # paths of its parameters, in the order of their rows
    shapes: tuple[Shape, ...]  # of the parameters
    columns: int  # width of the matrix
    stack: Shape = ()  # leading axes of all parameters, over which equal layers are scanned
    factor: Any = KroneckerFactor  # the type of its curvature, unless it is a `RowFactor`

    @property
    def heights(self) -> tuple[int, ...]:
        """Number of rows that each parameter fills."""
        return tuple(math.prod(shape) // (self.columns * self.count) for shape in self.shapes)

    @property
    def rows(self) -> int:
        """Height of the matrix."""
        return sum(self.heights)

    @property
    def count(self) -> int:
        """Number of matrices in the stack."""
        return math.prod(self.stack)

    def matrix(self, leaves: Mapping[str, Array]) -> Array:
        """The parameters as one array (count, rows, columns)."""
        parts = [leaves[leaf].reshape(self.count, -1, self.columns) for leaf in self.leaves]
        return jnp.concatenate(parts, axis=1)

    def split(self, matrix: Array) -> dict[str, Array]:
        """The inverse of `matrix`."""
        parts = jnp.split(matrix, list(itertools.accumulate(self.heights[:-1])), axis=1)
        each = zip(self.leaves, self.shapes, parts, strict=True)
        return {leaf: part.reshape(shape) for leaf, shape, part in each}


Blocks = tuple[LayerBlock, ...]
Groups = dict[str, Blocks]  # layers of one kind and shape, so that each operation runs once for all
Matrices = dict[str, Array]  # by group, (L, rows, columns)
KINDS = {"kernel": KroneckerFactor, "embedding": EmbeddingFactor, "scale": DiagonalFactor}


def infer_blocks(shapes: Mapping[str, Shape]) -> Blocks:
    """The blocks of a parameter tree by Flax's names, without a model.

    A leaf `kernel` (or `kernel/mean`, of a belief) is a dense layer whose last axis is the output; in a
    layer called query, key or value it has one input axis, as in `nnx.MultiHeadAttention`. `embedding`
    is a table, `scale` a normalisation. Names do not show stacked layers: use `find_blocks` for them.
    """
    blocks: list[LayerBlock] = []
    for path, shape in shapes.items():
        found = re.fullmatch(r"(?:(.*)/)?(kernel|embedding|scale)(/mean)?", path)
        if found is None:
            continue
        layer, leaf, mean = found.groups(default="")
        name = layer.rpartition("/")[2]
        least, most = {"kernel": (2, math.inf), "embedding": (2, 2), "scale": (1, 1)}[leaf]
        if name == "raw" or not least <= len(shape) <= most:
            continue
        bias = path.removesuffix(leaf + mean) + "bias" + mean
        leaves = (path, bias) if bias in shapes and leaf != "embedding" else (path,)
        projects = leaf == "kernel" and name in ("query", "key", "value")
        columns = math.prod(shape[1:]) if projects else shape[-1]
        sizes = tuple(shapes[each] for each in leaves)
        blocks.append(LayerBlock(layer or "model", leaves, sizes, columns, (), KINDS[leaf]))
    return tuple(blocks)


def groups_of(tree: Any, blocks: Blocks | None) -> Groups:
    """The groups of parameters or gradients by kind and shape; a mask may hide whole blocks.

    Without `blocks` they are inferred from the names in the tree. Raises a ValueError if a parameter
    belongs to no block, or a block's parameter is missing or of another shape.
    """
    masked = flatten(tree, lambda node: isinstance(node, optax.MaskedNode))
    shapes = {path: tuple(jnp.shape(leaf)) for path, leaf in flatten(tree).items()}
    hidden: dict[str, Shape] = dict.fromkeys(masked.keys() - shapes.keys(), ())
    found = infer_blocks({**hidden, **shapes}) if blocks is None else blocks
    if hidden:
        found = tuple(block for block in found if not shapes.keys().isdisjoint(block.leaves))
    if not found:
        raise ValueError(
            "A second-order method needs a layer with curvature factors. Got parameters "
            f"{', '.join(shapes) or 'none'}. See mj.optim.find_blocks."
        )
    groups: Groups = {}
    for block in found:
        for leaf, shape in zip(block.leaves, block.shapes, strict=True):
            if leaf in hidden:
                raise ValueError(
                    f"The curvature of layer {block.name!r} is that of all its parameters, "
                    f"{', '.join(block.leaves)}, and a mask hides {leaf!r}. Mask whole layers only."
                )
            if shapes.get(leaf) != shape:
                raise ValueError(
                    f"Layer {block.name!r} needs its parameter {leaf!r} of shape {shape}. Got "
                    f"{shapes.get(leaf, 'none')}. Give blocks=mj.optim.find_blocks(model) of the "
                    "trained model."
                )
        kind = block.factor.__name__.removesuffix("Factor").lower()
        key = f"{kind}_{block.rows}x{block.columns}"
        groups[key] = (*groups.get(key, ()), block)
    covered = {leaf for block in found for leaf in block.leaves}
    for path in shapes:
        if path not in covered:
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


def unstack(groups: Groups, matrices: Matrices) -> dict[str, Array]:
    """The inverse of `stack`, by path."""
    leaves: dict[str, Array] = {}
    for key, blocks in groups.items():
        ends = itertools.accumulate(block.count for block in blocks[:-1])
        for block, part in zip(blocks, jnp.split(matrices[key], list(ends)), strict=True):
            leaves |= block.split(part)
    return leaves


def empty_averages(groups: Groups, dtype: jnp.dtype) -> Factors:
    """The first averages of the factors of every group: zeros of weight zero."""
    empty: Factors = {}
    for key, blocks in groups.items():
        first, count = blocks[0], sum(block.count for block in blocks)
        shapes = shapes_of(first.factor, first.rows, first.columns)
        arrays = [jnp.zeros((count, *shape), dtype) for shape in shapes]
        empty[key] = first.factor(*arrays, jnp.zeros((), dtype))
    return empty


def stack_factors(groups: Groups, factors: Mapping[str, Factor]) -> Factors:
    """The factors of every group, stacked; raises unless every layer has a factor that fits."""
    if not isinstance(factors, Mapping):
        raise TypeError(
            "`update(..., factors=factors)` needs the factors that mj.optim.value_grad_and_factors "
            f"returns. Got {type(factors).__name__}."
        )
    stacked: Factors = {}
    for key, blocks in groups.items():
        each = [_checked(block, factors.get(block.name)) for block in blocks]
        kinds = {(type(factor).__name__, _tokens(factor)): None for factor in each}
        if len(kinds) > 1:
            raise ValueError(
                f"Layers {', '.join(block.name for block in blocks)} are of one shape, so they need "
                "factors of one kind and number of rows. Got "
                f"{', '.join(f'{kind} {rows}' for kind, rows in kinds)}. Take Kronecker factors."
            )
        weight = jnp.min(jnp.stack([factor.weight for factor in each]))
        arrays = map(jnp.concatenate, zip(*(factor[:-1] for factor in each), strict=True))
        kind: Any = type(each[0])
        stacked[key] = kind(*arrays, weight)
    return stacked


def _tokens(factor: Factor) -> Shape:
    """(N, T) of the rows of a factor that keeps them."""
    return factor.inputs.shape[1:3] if isinstance(factor, RowFactor) else ()


def _checked(block: LayerBlock, factor: Factor | None) -> Factor:
    """The factor, if it fits the layer; raises otherwise."""
    fix = "Take them from mj.optim.value_grad_and_factors of the trained model"
    if factor is None:
        raise ValueError(
            f"The factors of layer {block.name!r} ({', '.join(block.leaves)}) are missing. {fix}, or "
            "leave its parameters to another optimiser: mj.optim.for_model, or optax.partition."
        )
    if not isinstance(factor, Factor):
        raise TypeError(
            f"Layer {block.name!r} needs a factor of mj.optim. Got {type(factor).__name__}."
        )
    shapes = shapes_of(type(factor), block.rows, block.columns, _tokens(factor))
    for name, one, array in zip(factor._fields, shapes, factor, strict=False):
        shape, got = (block.count, *one), tuple(array.shape)
        if got != shape:
            raise ValueError(
                f"The factor {name!r} of layer {block.name!r} needs the shape {shape}. Got {got}. "
                f"{fix}; for layers with names unlike Flax's, pass blocks=mj.optim.find_blocks(model)."
            )
    return factor
