"""The parameters of a layer's curvature block, and how they form one matrix."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax import Array

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LayerBlock:
    """The parameters of one layer as a (rows, columns) matrix, or a stack of such matrices."""

    name: str  # path of the layer in the model, joined by "/"
    leaves: tuple[str, ...]  # paths of its parameters, in the order of their rows
    shapes: tuple[Shape, ...]  # of the parameters
    heights: tuple[int, ...]  # number of rows that each parameter fills
    columns: int  # width of the matrix
    stack: Shape = ()  # leading axes of all parameters, over which equal layers are scanned

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
        parts = [
            leaves[leaf].reshape(self.count, height, self.columns)
            for leaf, height in zip(self.leaves, self.heights, strict=True)
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def split(self, matrix: Array) -> dict[str, Array]:
        """The inverse of `matrix`."""
        ends = [sum(self.heights[: i + 1]) for i in range(len(self.heights) - 1)]
        parts = jnp.split(matrix, ends, axis=1)
        return {
            leaf: part.reshape(shape)
            for leaf, part, shape in zip(self.leaves, parts, self.shapes, strict=True)
        }


class DenseBlock(LayerBlock):
    """Inputs times kernel plus bias: the kernel's rows, then the bias as one more row."""

    @property
    def has_bias(self) -> bool:
        """Whether the last row is a bias."""
        return len(self.leaves) == 2


class EmbeddingBlock(LayerBlock):
    """An embedding table, one row for each symbol."""


class NormBlock(LayerBlock):
    """A row of gains and a row of biases; either may be missing."""


Blocks = tuple[LayerBlock, ...]


def dense_block(
    name: str, leaves: Sequence[str], shapes: Sequence[Shape], num_outputs: int, stack: Shape = ()
) -> DenseBlock:
    """The block of a kernel, whose last `num_outputs` axes are outputs, and perhaps a bias."""
    kernel = shapes[0]
    columns = math.prod(kernel[len(kernel) - num_outputs :])
    inputs = math.prod(kernel[len(stack) : len(kernel) - num_outputs])
    heights = (inputs, 1)[: len(leaves)]
    return DenseBlock(name, tuple(leaves), tuple(shapes), heights, columns, stack)


def row_block(
    kind: type[LayerBlock],
    name: str,
    leaves: Sequence[str],
    shapes: Sequence[Shape],
    stack: Shape = (),
) -> LayerBlock:
    """The block of an embedding table or of a normalisation, whose parameters are rows already."""
    columns = shapes[0][-1]
    heights = tuple(math.prod(shape) // (columns * math.prod(stack)) for shape in shapes)
    return kind(name, tuple(leaves), tuple(shapes), heights, columns, stack)


def infer_blocks(shapes: Mapping[str, Shape]) -> Blocks:
    """The blocks of a parameter tree by Flax's names, without a model.

    A leaf `kernel` (or `kernel/mean`, of a belief) is a dense layer whose last axis is the output; in a
    layer called query, key or value it has one input axis, as in `nnx.MultiHeadAttention`. `embedding`
    is a table, `scale` a normalisation. Names do not show stacked layers: use `find_blocks` for them.
    """
    blocks: list[LayerBlock] = []
    for path in shapes:
        parent, _, leaf = path.rpartition("/")
        belief = leaf == "mean"
        if belief:
            parent, _, leaf = parent.rpartition("/")
        if parent.rpartition("/")[2] == "raw":
            continue
        prefix = f"{parent}/" if parent else ""
        suffix = "/mean" if belief else ""
        bias = f"{prefix}bias{suffix}"
        leaves = [path, *([bias] if bias in shapes and leaf in ("kernel", "scale") else [])]
        sizes = [shapes[each] for each in leaves]
        name = parent or "model"
        if leaf == "kernel" and len(shapes[path]) >= 2:
            projection = parent.rpartition("/")[2] in ("query", "key", "value")
            num_outputs = len(shapes[path]) - 1 if projection else 1
            blocks.append(dense_block(name, leaves, sizes, num_outputs))
        elif leaf == "embedding" and len(shapes[path]) == 2:
            blocks.append(row_block(EmbeddingBlock, name, leaves, sizes))
        elif leaf == "scale" and len(shapes[path]) == 1:
            blocks.append(row_block(NormBlock, name, leaves, sizes))
    return tuple(blocks)
